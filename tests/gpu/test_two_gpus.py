"""Transfers between two GPUs: every byte, both ways, all paths, layouts that differ in all that may differ."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kvplan
from kvplan import KVLayout
from tests.paged_caches import DEVICE_NOTATION, Drawn, Move, Paged, Pair
from tests.profiles import examples
from tests.strategies import cases, neighbour_cases

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices"),
]

GPUS = ("cuda:0", "cuda:1")
PATHS = ("kernel", "copy_engine", "copy_engine_2d", "auto")
WAYS = {"push": GPUS, "pull": GPUS[::-1]}  # places of source and destination, for the executor of cuda:0
every_path = pytest.mark.parametrize("path", PATHS)
both_ways = pytest.mark.parametrize("route", WAYS)
NHD, HND = DEVICE_NOTATION, "layer: kv block head token dim"


@every_path
@both_ways
@examples(60)
@given(case=st.one_of(cases(), neighbour_cases()), by_layer=st.booleans())
def test_every_path_moves_what_the_oracle_moves(executor_of, path, route, case, by_layer):
    drawn = Drawn(case, WAYS[route])
    transfer = executor_of(path=path).submit(drawn.plan, by_layer=by_layer)
    assert transfer.result().nbytes == drawn.plan.nbytes
    drawn.check()


@examples(60)
@given(some=st.lists(st.tuples(cases(max_blocks=3), st.sampled_from(list(WAYS))), min_size=2, max_size=6))
def test_many_transfers_at_once_by_both_gpus(executor_of, some):
    drawn = [Drawn(case, WAYS[route]) for case, route in some]
    with kvplan.Executor("cuda:1") as other:
        flying = [(executor_of(path="auto"), other)[k % 2].submit(each.plan) for k, each in enumerate(drawn)]
        for each, transfer in zip(drawn, flying, strict=True):
            assert transfer.result().nbytes == each.plan.nbytes
            each.check()


@every_path
@both_ways
@pytest.mark.parametrize("overlap", ["idle", "decode"])
@pytest.mark.parametrize("dim", [16, 64, 132, 512, 4096])
def test_layouts_of_both_orders_and_of_other_blocks(path, route, overlap, dim):
    """NHD to HND, blocks of 4 tokens to blocks of 8; more rows than the kernel reads in place."""
    src = Paged(NHD, layer=3, block=40, token=4, head=3, dim=dim, padded=True)
    dst = Paged(HND, layer=3, block=20, token=8, head=3, dim=dim)
    pair = Pair(src, dst, WAYS[route])
    rng = np.random.default_rng(dim)
    with kvplan.Executor("cuda:0", kvplan.Policy(path=path, overlap=overlap)) as executor:
        plan = pair.plan(Move(rng.permutation(40)[:30].tolist(), rng.permutation(20)[:16].tolist(), 0, 1))
        executor.submit(plan).synchronize()
    pair.check()


@both_ways
def test_streams_of_either_gpu_are_waited_for_and_wait(route):
    """The default stream has the same handle on both GPUs."""
    cache = Paged(NHD, block=64, dim=8192)
    pair = Pair(cache, Paged(HND, block=64, dim=8192), WAYS[route])
    src_device, dst_device = WAYS[route]
    with kvplan.Executor("cuda:0", kvplan.Policy(path="kernel")) as executor:
        for user in (torch.cuda.default_stream(src_device), torch.cuda.Stream(src_device)):
            fresh = pair.renew(5)
            torch.cuda.synchronize(src_device)
            with torch.cuda.stream(user):
                torch.cuda._sleep(20_000_000)
                for root, new in zip(pair.src_roots, fresh, strict=True):
                    root.copy_(new, non_blocking=True)
            plan = pair.plan(Move(range(64), range(63, -1, -1)))
            transfer = executor.submit(plan, after=user)
            for reader in (torch.cuda.default_stream(dst_device), torch.cuda.Stream(dst_device)):
                transfer.wait(reader)
                with torch.cuda.stream(reader):
                    seen = [root.clone() for root in pair.dst_roots]
                reader.synchronize()
                for root, want in zip(seen, pair.dst_bytes, strict=True):
                    np.testing.assert_array_equal(root.cpu().numpy(), want)
    pair.check()


@pytest.mark.parametrize("ranks", [2, 4])
def test_live_ranks_are_resharded_directly(ranks):
    """Ranks of both GPUs to one whole cache, in one launch; and back to ranks in another order of the GPUs."""
    heads, blocks = 8, 24
    each = heads // ranks

    def caches(count: int, first: int) -> tuple[list[list[torch.Tensor]], list[KVLayout]]:
        held, layouts = [], []
        for rank in range(count):
            device = GPUS[(rank + first) % 2]
            of_rank = heads // count
            tensors = [torch.randint(0, 256, (2, blocks, 16, of_rank, 64), dtype=torch.uint8, device=device)
                       for _ in range(3)]  # fmt: skip
            held.append(tensors)
            layouts.append(KVLayout.from_tensors(NHD, tensors, head_start=rank * of_rank))
        return held, layouts

    (source, from_layouts), (whole, (whole_layout,)) = caches(ranks, 0), caches(1, 1)
    target, to_layouts = caches(ranks, 1)
    ids = np.random.default_rng(ranks).permutation(blocks)
    with kvplan.Executor("cuda:1", kvplan.Policy(path="kernel")) as executor:
        gathered = kvplan.join(list(kvplan.reshard(from_layouts, [whole_layout]).plan(ids, ids[::-1]).values()))
        there = executor.submit(gathered)
        scattered = kvplan.join(list(kvplan.reshard([whole_layout], to_layouts).plan(ids[::-1], ids).values()))
        back = executor.submit(scattered, after=there)
        back.synchronize()
        assert there.result().launches == 1
    for rank in range(ranks):
        for layer in range(3):
            mine = source[rank][layer].cpu()
            assert torch.equal(target[rank][layer].cpu(), mine)
            part = whole[0][layer][:, ids[::-1].copy(), :, rank * each : (rank + 1) * each].cpu()
            assert torch.equal(part, mine[:, ids])


def test_bad_ids_and_other_memory_are_refused_before_a_launch():
    cache = Paged(NHD, block=8)
    pair = Pair(cache, cache, WAYS["push"])
    with pytest.raises(kvplan.BlockIndexError):
        pair.program.plan([8], [0])
    with pytest.raises(kvplan.BlockIndexError):
        pair.program.plan([0], [-1])
    there = Pair(cache, cache, ("cuda:1", "cuda:1"))
    with kvplan.Executor("cuda:0") as executor:
        with pytest.raises(kvplan.PathError, match="take an executor of cuda:1"):
            executor.submit(there.program.plan([1], [2]))
        with (
            pytest.raises(kvplan.PathError, match="staged"),
            kvplan.Executor("cuda:0", kvplan.Policy(path="staged")) as staged,
        ):
            staged.submit(pair.program.plan([1], [2]))
    pair.check()
    there.check()
