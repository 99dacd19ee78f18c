"""Offloading as vLLM 0.33 asks for it, without vLLM: which bytes a worker moves, and what it refuses to be made of."""

from __future__ import annotations

import subprocess
import sys
from itertools import accumulate

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import kvplan
from kvplan.engines import vllm
from kvplan.engines.vllm.worker import Worker
from tests.contract.engines.vllm.stand_ins import (
    finish,
    mapping,
    on_device,
    on_host,
    reference,
    rows_of,
    run,
    torch,
    two_layers,
    workers,
)
from tests.profiles import examples


@pytest.fixture
def made():
    """Makes workers, and shuts them down."""
    with workers() as make:
        yield make


def test_blocks_are_stored_and_loaded_elsewhere(made):
    worker, cache, pool = two_layers(made)
    assert worker.submit_store(7, on_device([5, 2]), on_host([0, 3])) is True
    result = finish(worker, 7)
    assert (result.success, result.transfer_size) == (True, 2 * 128)
    assert result.transfer_time >= 0
    assert torch.equal(pool[0], cache[5])
    assert torch.equal(pool[3], cache[2])
    assert not pool[[1, 2, 4, 5]].any()
    was = cache.clone()
    assert worker.submit_load(8, on_host([3, 0]), on_device([11, 6])) is True
    assert finish(worker, 8).transfer_size == 256
    was[11], was[6] = was[2], was[5]
    assert torch.equal(cache, was)


def test_what_pads_a_page_is_not_moved(made):
    cache, device = rows_of([64, 64], 4, seed=2)
    pool, host = rows_of([64, 64], 4)
    worker = made([[reference(0, 40), reference(1, 64)]], device, host, 1)
    worker.submit_store(1, on_device([3]), on_host([1]))
    assert finish(worker, 1).transfer_size == 104
    assert torch.equal(pool[1, :40], cache[3, :40])
    assert not pool[1, 40:64].any()
    assert torch.equal(pool[1, 64:], cache[3, 64:])


def test_layers_that_share_a_cache_are_moved_once(made):
    cache, device = rows_of([64], 4, seed=2)
    pool, host = rows_of([64], 4)
    worker = made([[reference(0, 40), reference(0, 64), reference(0, 40)]], device, host, 1)
    worker.submit_store(1, on_device([3]), on_host([1]))
    assert finish(worker, 1).transfer_size == 64
    assert torch.equal(pool[1], cache[3])


def canonical_ranks(made, ranks, blocks_per_chunk, writers=1):
    """Ranks with two heads of four bytes a token, four tokens a page, NHD: token rows of all ranks' heads in turn."""
    shards = ranks // writers
    caches, workers = [], []
    pool, host = rows_of([32 * shards * blocks_per_chunk], 6, gap=96)
    for rank in range(ranks):
        shard = rank // writers
        cache, device = rows_of([32], 12, seed=shard)
        runs = [run(0, 8 * shard, 8, 4, (8, 8 * shards))]
        held = mapping(runs, 32, 32 * shards, (rank % writers, writers))
        workers.append(made([[reference(0, 32, held)]], device, host, blocks_per_chunk, canonical=True))
        caches.append(cache)
    return caches, pool, workers


def test_canonical_pages_hold_all_ranks_heads(made):
    caches, pool, workers = canonical_ranks(made, 3, 2)
    for worker in workers:
        worker.submit_store(1, on_device([5, 6, 7], firsts=[1]), on_host([4, 2]))
        assert finish(worker, 1).transfer_size == 3 * 32
    pages = pool[:, :192].reshape(12, 4, 3, 8)  # page, token, rank, heads
    for place, block in ((9, 5), (4, 6), (5, 7)):
        for rank, cache in enumerate(caches):
            assert torch.equal(pages[place, :, rank].flatten(), cache[block]), (place, rank)
    assert not pages[[k for k in range(12) if k not in (4, 5, 9)]].any()
    assert not pool[:, 192:].any()
    for cache, worker in zip(caches, workers, strict=True):
        was = cache.clone()
        worker.submit_load(2, on_host([4, 2]), on_device([0, 1], firsts=[1]))
        assert finish(worker, 2).transfer_size == 64
        assert torch.equal(cache[:2], was[[5, 6]])


def test_ranks_that_hold_the_same_store_in_turn_and_load_all(made):
    """Of two ranks, the first stores even places of the host: chunk 4 has place 9, chunk 2 has 4 and 5."""
    caches, pool, workers = canonical_ranks(made, 2, 2, writers=2)
    moved = []
    for worker in workers:
        before = pool.clone()
        worker.submit_store(1, on_device([5, 6, 7], firsts=[1]), on_host([4, 2]))
        moved.append(finish(worker, 1).transfer_size)
        changed = (pool != before)[:, :64].reshape(12, 32).any(dim=1)
        assert changed.nonzero().flatten().tolist() == ([4] if len(moved) == 1 else [5, 9])
    assert moved == [32, 64]
    pages = pool[:, :64].reshape(12, 32)
    assert torch.equal(pages[[9, 4, 5]], caches[0][[5, 6, 7]])
    for worker, cache in zip(workers, caches, strict=True):
        worker.submit_load(2, on_host([4, 2]), on_device([0, 1, 2], firsts=[1]))
        assert finish(worker, 2).transfer_size == 96
        assert torch.equal(cache[:3], cache[5:8])


@examples(100)
@example([(1, 1, 0, 0, 2), (1, 1, 0, 4, 2)])  # of one shape, in steps that differ
@given(st.lists(st.tuples(
    st.integers(1, 2), st.integers(1, 3), st.sampled_from([0, 2]), st.sampled_from([0, 4]), st.integers(1, 4),
), min_size=1, max_size=8))  # fmt: skip
def test_runs_of_a_canonical_page_move_byte_by_byte(drawn):
    """Runs as they may come, each repeated in steps: byte for byte what the mapping says, and no other."""
    runs, local, canonical, pairs = [], 0, 0, []
    for nbytes, number, apart, farther, times in drawn:
        strides = (nbytes + apart, nbytes + farther) if number > 1 else (nbytes, nbytes)
        for _ in range(times):
            runs.append(run(local, canonical, nbytes, number, strides))
            pairs += [(local + i * strides[0] + byte, canonical + i * strides[1] + byte)
                      for i in range(number) for byte in range(nbytes)]  # fmt: skip
            local += number * strides[0]
            canonical += number * strides[1] + farther
    move_byte_by_byte(runs, local, canonical, pairs)


def move_byte_by_byte(runs, local, canonical, pairs):
    """Store a page by a mapping of these runs; each pair is a byte's place here and on the host."""
    (cache, device), (pool, host) = rows_of([local], 4, seed=1), rows_of([canonical], 3)
    with workers() as make:
        worker = make([[reference(0, local, mapping(runs, local, canonical))]], device, host, 1, canonical=True)
        worker.submit_store(1, on_device([2]), on_host([1]))
        assert finish(worker, 1).transfer_size == len(pairs)
    wanted = torch.zeros_like(pool)
    ours, theirs = map(list, zip(*pairs, strict=True))
    wanted[1, theirs] = cache[2, ours]
    assert torch.equal(pool, wanted)


@given(st.data())
@examples(40)
def test_bytes_of_any_job_are_those_of_a_loop_over_blocks(data):
    """The law of a job: block n of a group goes to place (first + n) of its chunks, layer by layer, and back."""
    per_chunk = data.draw(st.integers(1, 4))
    sizes = data.draw(st.lists(st.sampled_from([24, 32]), min_size=1, max_size=3))
    tensors = st.lists(st.integers(0, len(sizes) - 1), min_size=1, max_size=3, unique=True)
    groups = data.draw(st.lists(tensors, min_size=1, max_size=3))
    counts = [data.draw(st.integers(0, 5)) for _ in groups]
    firsts = [data.draw(st.integers(0, 9)) for _ in groups]
    blocks = data.draw(st.permutations(range(16)))[: sum(counts)]
    needed = [-(-(n + f % per_chunk) // per_chunk) if n else 0 for n, f in zip(counts, firsts, strict=True)]
    chunks = data.draw(st.permutations(range(20)))[: sum(needed)]
    cache, device = rows_of(sizes, 16, seed=4, gap=data.draw(st.sampled_from([0, 8])))
    pool, host = rows_of([size * per_chunk for size in sizes], 20, seed=5)
    wanted_pool, wanted_cache = pool.clone(), cache.clone()
    starts, pool_starts = ([0, *accumulate(size * n for size in sizes)] for n in (1, per_chunk))
    spare = [block for block in range(16) if block not in blocks]
    elsewhere = (spare * 16)[: len(blocks)] if len(spare) >= len(blocks) else blocks
    b = c = 0
    for group, count, first, used in zip(groups, counts, firsts, needed, strict=True):
        for n in range(count):
            chunk, place = divmod(first % per_chunk + n, per_chunk)
            for tensor in group:
                size, start = sizes[tensor], pool_starts[tensor] + place * sizes[tensor]
                source = cache[blocks[b + n], starts[tensor] : starts[tensor] + size]
                wanted_pool[chunks[c + chunk], start : start + size] = source
                wanted_cache[elsewhere[b + n], starts[tensor] : starts[tensor] + size] = source
        b, c = b + count, c + used
    worker = Worker([[reference(t, sizes[t]) for t in group] for group in groups], device, host, per_chunk)
    try:
        worker.submit_store(1, on_device(blocks, counts, firsts), on_host(chunks))
        assert finish(worker, 1).success
        assert torch.equal(pool, wanted_pool)
        worker.submit_load(2, on_host(chunks), on_device(elsewhere, counts, firsts))
        assert finish(worker, 2).success
        assert torch.equal(cache, wanted_cache)
    finally:
        worker.shutdown()


# ---- what is refused when a worker is made ----


def test_rows_that_are_no_pages(made):
    _, device = rows_of([64], 4)
    _, host = rows_of([128], 4)
    with pytest.raises(kvplan.LayoutError, match="fragments reach byte 79 of a page of 64 bytes"):
        made([[reference(0, 80)]], device, host, 2)


# ---- without vLLM ----


@pytest.mark.slow
def test_the_adapter_imports_no_engine():
    probe = "import sys, kvplan.engines.vllm; print({'vllm', 'torch'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_a_name_that_is_none_is_told():
    with pytest.raises(AttributeError, match="has no attribute 'Spec'; it has KVPlanOffloadingConnector"):
        _ = vllm.Spec


def test_the_policy_is_part_of_the_configuration():
    assert vllm.policy_of({}) == kvplan.Policy(overlap="decode")
    assert vllm.policy_of({"kvplan": {"path": "kernel", "overlap": "idle"}}) == kvplan.Policy(path="kernel")
    for wrong in ({"paths": "kernel"}, "kernel"):
        with pytest.raises(kvplan.PathError, match=r"give a mapping with fields of kvplan\.Policy: path, threads"):
            vllm.policy_of({"kvplan": wrong})
    with pytest.raises(kvplan.PathError, match="unknown path 'fast'"):
        vllm.policy_of({"kvplan": {"path": "fast"}})
