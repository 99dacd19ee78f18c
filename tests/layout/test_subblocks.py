"""Opaque blocks inside larger blocks, and heads in allocations of their own: literal numbers, and what is refused."""

from __future__ import annotations

import json

import numpy as np
import pytest

import kvplan
from kvplan import KVLayout, LayoutError
from kvplan.layout.dump import document_of


def device(layers=2, pages=6, nbytes=8):
    """One opaque page a block, one tensor a layer; page ``p`` of layer ``l`` holds ``100 l + p``."""
    return [np.arange(pages, dtype=np.uint8).repeat(nbytes).reshape(pages, nbytes) + 100 * k for k in range(layers)]


def moved(executor, src, dst, *ids):
    program = kvplan.compile(src, dst)
    return executor.submit(program.plan(*ids)).result()


def test_opaque_blocks_lie_one_after_another_in_a_larger_block(executor):
    caches, pool = device(), np.zeros((2, 2, 4, 8), np.uint8)  # two blocks of two layers of four pages
    gpu = KVLayout.from_tensors("layer: block dim", caches)
    host = KVLayout.from_tensors("block layer subblock dim", pool)
    assert (host.opaque, host.block_tokens, host.num_blocks, host.block_nbytes) == (True, 4, 2, 64)
    program = kvplan.compile(gpu, host)
    assert (program.unit_tokens, program.unit_nbytes, program.runs, program.run_nbytes) == (1, 16, 2, (8, 8))
    assert (program.program.src_units, program.program.dst_units) == (1, 4)
    # Pages 5, 0, 3 go behind the first page of block 1; the page after them stays as it is.
    assert moved(executor, gpu, host, [5, 0, 3], [1], 0, 1).nbytes == 48
    assert pool[0].max() == 0
    assert pool[1, :, :, 0].tolist() == [[0, 5, 0, 3], [0, 105, 100, 103]]
    # And back, into other pages.
    moved(executor, host, gpu, [1], [2, 1, 4], 1)
    assert [cache[:, 7].tolist() for cache in caches] == [[0, 0, 5, 3, 3, 5], [100, 100, 105, 103, 103, 105]]


def test_sub_blocks_may_be_strided_split_and_flat():
    """Page ``p`` of the larger block at literal offsets, in three orders."""
    apart = KVLayout.from_tensors("block subblock layer dim", np.zeros((2, 4, 3, 8), np.uint8))
    padded = KVLayout.from_tensors("block subblock dim", np.zeros((2, 4, 16), np.uint8)[:, :, :8])
    flat = KVLayout.from_tensors("(block subblock) dim", np.zeros((8, 8), np.uint8), sizes={"subblock": 4})
    split = KVLayout.from_tensors("block subblock.1 subblock.0 dim", np.zeros((2, 2, 2, 8), np.uint8))
    for layout, steps in ((apart, (0, 24, 48, 72)), (padded, (0, 16, 32, 48)), (flat, (0, 8, 16, 24)),
                          (split, (0, 16, 8, 24))):  # fmt: skip
        first = layout.address(layer=0, part="kv", block=1)
        assert tuple(layout.address(layer=0, part="kv", block=1, token=k) - first for k in range(4)) == steps
    assert flat.num_blocks == 2
    with pytest.raises(LayoutError, match=r"sub-block 4 of layer 0 'kv'; sub-blocks are 0 to 3"):
        flat.address(layer=0, part="kv", token=4)


def merged(blocks, tokens, pages):
    """Rows of 2 bytes a token, and opaque pages of 8 bytes beside them."""
    rows = np.zeros((blocks, tokens, 2), np.uint8)
    index = np.zeros((blocks, pages, 8), np.uint8)
    layout = KVLayout.merge([
        KVLayout.from_tensors("block token dim", rows),
        KVLayout.from_tensors("block subblock dim", index, part="index"),
    ])  # fmt: skip
    return layout, rows, index


def test_rows_and_opaque_pages_share_their_ids(executor):
    """Blocks of 4 tokens and one page; host blocks of 12 tokens and three pages."""
    gpu, rows, index = merged(5, 4, 1)
    host, host_rows, host_index = merged(2, 12, 3)
    rows[:] = np.arange(20).reshape(5, 4, 1)
    index[:] = np.arange(5).reshape(5, 1, 1)
    program = kvplan.compile(gpu, host)
    assert (program.unit_tokens, program.unit_nbytes) == (4, 16)
    moved(executor, gpu, host, [4, 2], [1], 0, 1)
    assert host_rows[1, :, 0].tolist() == [0, 0, 0, 0, 16, 17, 18, 19, 8, 9, 10, 11]
    assert host_index[1, :, 0].tolist() == [0, 4, 2]
    assert host_rows[0].max() == host_index[0].max() == 0


def test_a_unit_holds_whole_sub_blocks():
    """Blocks of 8 tokens in 2 pages, and of 12 in 3: units of 4 tokens, one page each."""
    program = kvplan.compile(merged(3, 8, 2)[0], merged(2, 12, 3)[0])
    assert (program.unit_tokens, program.program.src_units, program.program.dst_units) == (4, 2, 3)
    text = program.explain()
    assert "skips count units, not tokens: src_skip is 0 to 1; dst_skip is 0 to 2" in text


def test_a_pool_for_opaque_blocks(executor):
    gpu = KVLayout.from_tensors("layer: block dim", device())
    pool = kvplan.allocate("block subblock layer dim", like=gpu, num_blocks=2, sizes={"subblock": 3})
    assert (pool.num_blocks, pool.block_tokens, pool.block_nbytes) == (2, 3, 48)
    moved(executor, gpu, pool, range(6), [1, 0])
    assert pool.tensors[:, :, 1, 0].tolist() == [[103, 104, 105], [100, 101, 102]]
    assert kvplan.allocate("block subblock layer dim", like=pool).block_tokens == 3
    with pytest.raises(LayoutError, match=r"no 'token' axis, and must hold 64 of them: give sizes=.'subblock'"):
        kvplan.allocate("block layer dim", like=gpu, block_tokens=64)
    with pytest.raises(LayoutError, match="has opaque sub-blocks, and like has token slots: write token"):
        kvplan.allocate("block subblock dim", like=merged(3, 8, 2)[0].slice(parts=["kv"]))


def test_what_lies_at_an_address_of_a_sub_block():
    spec = {"notation": "block subblock dim", "dtype": "uint8", "address": 4096,
            "sizes": {"block": 2, "subblock": 4, "dim": 8}}  # fmt: skip
    layout = KVLayout.from_spec(spec)
    (place,) = kvplan.locate(layout, 4096 + 32 + 2 * 8 + 5)
    assert str(place) == "layer 0 kv, block 1, sub-block 2 (of 4), byte 5 (of 8)"
    assert (place.tokens, place.subblocks, place.row.subblock, place.row.token) == ((), (2,), 2, None)


def test_a_dump_keeps_sub_blocks_and_heads_apart():
    for layout in (merged(2, 12, 3)[0], KVLayout.from_tensors("layer head: block token dim", heads_apart())):
        document = json.loads(json.dumps(document_of(layout.built)))
        assert KVLayout.from_spec(document) == layout
    document["components"][0]["head_start"] = 1
    with pytest.raises(LayoutError, match="layer 0 'kv' is held 3 times, and not as heads apart"):
        KVLayout.from_spec(document)


# ---- heads in allocations of their own -------------------------------------------------------------------------


def heads_apart(layers=2, heads=3):
    return [[np.full((4, 2, 8), 10 * k + h, np.uint8) for h in range(heads)] for k in range(layers)]


def test_heads_in_separate_allocations(executor):
    caches = heads_apart()
    layout = KVLayout.from_tensors("layer head: block token dim", caches, head_start=5)
    assert (layout.heads, layout.layers, layout.block_nbytes) == (range(5, 8), (0, 1), 2 * 3 * 2 * 8)
    at = layout.address(layer=1, part="kv", block=3, token=1, head=6)
    assert at == caches[1][1].ctypes.data + 3 * 16 + 8
    with pytest.raises(LayoutError, match="head 8 of layer 0 'kv'; heads are 5 to 7"):
        layout.address(layer=0, part="kv", head=8)
    pool = np.zeros((4, 2, 2, 4, 8), np.uint8)  # heads 4 to 7
    host = KVLayout.from_tensors("block layer token head dim", pool, head_start=4)
    program = kvplan.compile(layout, host)
    assert (program.unit_tokens, program.runs, program.run_nbytes) == (2, 2 * 3 * 2, (8, 8))
    moved(executor, layout, host, [3, 0], [1, 2])
    assert pool[1, :, 0, :, 0].tolist() == [[0, 0, 1, 2], [0, 10, 11, 12]]
    assert pool[0].max() == pool[3].max() == 0
    assert "heads 5-7 of 5-7 in the source, 4-7 in the destination" in program.explain()


def test_heads_that_are_views_of_one_tensor_are_a_stride():
    cache = np.zeros((4, 3, 2, 8), np.uint8)  # block head token dim
    apart = KVLayout.from_tensors("head: block token dim", [cache[:, head] for head in range(3)])
    assert apart == KVLayout.from_tensors("block head token dim", cache)
    assert len(apart.components) == 1


def test_heads_apart_on_both_sides_and_a_fused_k_and_v(executor):
    """Source: a tensor a head, K then V in each row. Destination: a tensor a head, K and V apart, other heads."""
    fused = [np.arange(8, dtype=np.uint8).reshape(1, 1, 8).repeat(4, 0) + 10 * h for h in range(4)]
    split = [[np.zeros((4, 1, 4), np.uint8) for _ in range(3)] for _ in "kv"]
    src = KVLayout.from_tensors("head: block token dim", fused)
    dst = KVLayout.from_tensors("kv head: block token dim", split, head_start=2)
    moved(executor, src, dst, [0], [3])
    assert [[row[3, 0].tolist() for row in half] for half in split] == [
        [[20, 21, 22, 23], [30, 31, 32, 33], [0, 0, 0, 0]],
        [[24, 25, 26, 27], [34, 35, 36, 37], [0, 0, 0, 0]],
    ]


def test_ranks_of_heads_apart_into_one_pool(executor):
    ranks = [heads_apart(1, 2)[0] for _ in range(2)]
    ranks[1] = [cache + 5 for cache in ranks[1]]
    sources = [KVLayout.from_tensors("head: block token dim", rank, head_start=2 * k) for k, rank in enumerate(ranks)]
    pool = np.zeros((4, 2, 4, 8), np.uint8)
    programs = kvplan.reshard(sources, KVLayout.from_tensors("block token head dim", pool))
    for program in programs.values():
        executor.submit(program.plan([1], [2])).synchronize()
    assert pool[2, 1, :, 7].tolist() == [0, 1, 5, 6]
