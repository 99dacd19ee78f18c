"""What a plan looks like to each path, against what its lowerings really hold."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvplan
from kvplan import KVLayout
from kvplan.cost.statistics import (
    Pieces,
    Statistics,
    chains,
    facts_of,
    statistics_of,
)
from kvplan.plan.merges import possible_merges
from kvplan.plan.staging import staging_of
from tests.plan.small_caches import LAYERED, PAGED, zeros
from tests.simulated.objects import Tensor
from tests.strategies import Case, cases, neighbour_cases

KIB = 1 << 10
NONE = Pieces()


def store_between(cache: tuple[str, np.ndarray], pool: tuple[str, np.ndarray], *told, by: str = "store") -> Statistics:
    """Statistics of a store, or a load, of some ids and skips."""
    device, host = KVLayout.from_tensors(cache[0], Tensor(cache[1])), KVLayout.from_tensors(*pool)
    sides = (device, host) if by == "store" else (host, device)
    return statistics_of(kvplan.compile(*sides).plan(*told))


# 4 layers of 8 blocks of 16 tokens of 64 bytes: a run of one layer and block has 1,024 bytes, a block 4,096.


@pytest.mark.parametrize("by", ["store", "load"])
def test_layer_first_to_page_first(by):
    made = store_between((LAYERED, zeros(4, 8, 16, 64)), (PAGED, zeros(8, 4, 16, 64)), [1, 3, 6], [3, 5, 0], by=by)
    assert made == Statistics(
        route=by, nbytes=12_288, groups=1, runs=12, alignment=16, copies=Pieces(12, 12_288, 0, 0),
        calls=3, rows=12, rowless=NONE, extents=Pieces(3, 12_288, 0, 0), granule_nbytes=4096,
    )  # fmt: skip


def test_units_that_touch_in_order_are_one_copy_a_run():
    both = (LAYERED, zeros(4, 8, 16, 64)), (LAYERED, zeros(4, 8, 16, 64))
    made = store_between(*both, [2, 3, 4, 6], [1, 2, 3, 4])
    assert (made.runs, made.copies) == (16, Pieces(8, 16_384, 0, 0))  # blocks 2 to 4, and 6: two copies a layer
    out_of_order = store_between(*both, [4, 3, 2, 6], [3, 2, 1, 4])
    assert (out_of_order.runs, out_of_order.copies.total) == (16, 8)
    assert (out_of_order.extents, out_of_order.calls) == (made.extents, made.calls)  # nothing merges on those paths


@pytest.mark.parametrize(
    ("nbytes", "kind"), [(28 * KIB - 16, "small"), (28 * KIB, "large"), (28 * KIB + 16, "large"), (1, "small")]
)
def test_large_pieces_begin_at_28_kib(nbytes, kind):
    cache, pool = zeros(9, 1, nbytes)[::2], zeros(9, 1, nbytes)[::2]
    made = store_between(("block token dim", cache), ("block token dim", pool), [0, 2], [1, 3])
    wanted = Pieces(2, 2 * nbytes, 0, 0) if kind == "small" else Pieces(0, 0, 2, 2 * nbytes)
    assert (made.copies, made.rowless, made.extents) == (wanted, wanted, wanted)


def test_larger_host_blocks_and_skips():
    # Host blocks of 64 tokens hold 4 units of 16; the first of block 5 is taken. 6 units: 3 in block 5, 3 in block 2.
    cache, pool = zeros(4, 8, 16, 64), zeros(8, 4, 64, 64)
    made = store_between((LAYERED, cache), (PAGED, pool), [7, 1, 4, 0, 6, 2], [5, 2], 0, 1)
    assert (made.nbytes, made.runs, made.granule_nbytes) == (24_576, 24, 16_384)
    assert (made.calls, made.rows) == (6, 24)
    # A host block is one extent of 16 KiB; 6 units are counted as 2 whole blocks.
    assert made.extents == Pieces(2, 32_768, 0, 0)
    whole = store_between((LAYERED, cache), (PAGED, pool), [7, 1, 4, 0], [5])
    assert whole.extents == Pieces(1, 16_384, 0, 0)


def test_several_groups_joined():
    one = KVLayout.from_tensors(LAYERED, Tensor(zeros(4, 8, 16, 64)))
    other = KVLayout.from_tensors(LAYERED, Tensor(zeros(2, 8, 16, 2048)))
    pools = KVLayout.from_tensors(PAGED, zeros(8, 4, 16, 64)), KVLayout.from_tensors(PAGED, zeros(8, 2, 16, 2048))
    first, second = kvplan.compile(one, pools[0]), kvplan.compile(other, pools[1])
    made = statistics_of(kvplan.join([first.plan([1, 3], [3, 5]), second.plan([2], [6]), first.plan([6], [0])]))
    assert made == Statistics(
        route="store", nbytes=12_288 + 65_536, groups=2, runs=14, alignment=16,
        copies=Pieces(12, 12_288, 2, 65_536), calls=4, rows=14, rowless=NONE,
        extents=Pieces(3, 12_288, 1, 65_536), granule_nbytes=65_536,
    )  # fmt: skip


@pytest.mark.parametrize("kinds", ["host", "device"])
def test_without_two_kinds_of_memory_there_are_no_extents(kinds):
    arrays = zeros(4, 8, 16, 64), zeros(8, 4, 16, 64)
    tensors = arrays if kinds == "host" else tuple(map(Tensor, arrays))
    pair = (KVLayout.from_tensors(name, tensor) for name, tensor in zip((LAYERED, PAGED), tensors, strict=True))
    made = statistics_of(kvplan.compile(*pair).plan([1, 3], [3, 5]))
    assert (made.route, made.runs, made.calls) == (kinds, 8, 2)
    assert (made.extents, made.granule_nbytes) == (NONE, 0)


@pytest.mark.parametrize(("dim", "alignment"), [(64, 16), (24, 8), (20, 4), (18, 2), (17, 1)])
def test_alignment_is_that_of_every_address_and_at_most_16(dim, alignment):
    flat = np.zeros(2 * 9 * dim + 64, np.int8)
    start = -flat.ctypes.data % 64
    cache = flat[start : start + 2 * 9 * dim].reshape(9, 2, 1, dim)[::2]  # blocks of 2 layers, every other
    made = store_between((PAGED, cache[:, :1]), (PAGED, aligned(4, 1, 1, dim)), [1, 3], [2, 0])
    assert made.alignment == alignment


def aligned(*shape: int) -> np.ndarray:
    flat = np.zeros(int(np.prod(shape)) + 64, np.int8)
    start = -flat.ctypes.data % 64
    return flat[start : start + int(np.prod(shape))].reshape(shape)


# Laws, over the layouts and ids that the lowerings' own laws are tested with.


def planned(case: Case, direction: str):
    src, dst = case.src.build(case.seed), case.dst.build(case.seed + 1)
    pair = (_layout(src, host=direction in ("load", "host")), _layout(dst, host=direction in ("store", "host")))
    return kvplan.compile(*pair).plan(case.src_ids, case.dst_ids, case.src_skip, case.dst_skip)


def _layout(cache, *, host: bool) -> KVLayout:
    return KVLayout.from_tensors(
        cache.notation, cache.tensors if host else _tensors(cache.tensors), sizes=cache.told,
        layer_start=cache.layer_start, head_start=cache.head_start,
    )  # fmt: skip


def _tensors(nested):
    return [_tensors(each) for each in nested] if isinstance(nested, list) else Tensor(nested)


all_plans = st.builds(
    planned, st.one_of(cases(), neighbour_cases()), st.sampled_from(("load", "store", "host", "device"))
)


@given(plan=all_plans)
def test_every_count_is_bounded_by_the_lowerings(plan):
    made = statistics_of(plan)
    assert not plan.seams.any  # the caches drawn here have room between allocations
    assert (made.nbytes, made.route) == (plan.nbytes, plan.direction)
    copies, rows = plan.descriptors(), plan.strided()
    for pieces in (made.copies, made.rowless, made.extents):
        assert (pieces.small == 0) <= (pieces.small_nbytes == 0)
        assert (pieces.large == 0) <= (pieces.large_nbytes == 0)
    # Only what touches is left unmerged, never the other way round.
    assert made.runs >= made.copies.total >= copies.size.size
    assert made.runs == sum(part.group.offsets[0].size * part.units.shape[1] for part in plan.parts)
    assert made.copies.small_nbytes + made.copies.large_nbytes == plan.nbytes
    # Without seams the 2-D counts are those of the lowering.
    assert made.calls + made.rowless.total == len(rows)
    assert made.calls == np.count_nonzero(rows.height > 1)
    assert made.rows + made.rowless.total == rows.height.sum()
    assert made.rowless.small_nbytes + made.rowless.large_nbytes == rows.width[rows.height == 1].sum()
    if plan.nbytes:
        addresses = np.concatenate(plan.descriptors())
        assert not np.any(addresses % made.alignment)


@given(plan=all_plans)
def test_copies_are_exact_where_nothing_meets_out_of_order(plan):
    """A run merges with its like in a unit at its own length's distance, and where a joint is possible with others.

    Where the program has no joint, and all units at such a distance follow one another in the plan, nothing else can
    merge: then the count is exact.
    """
    groups = {id(part.group): part.group for part in plan.parts if part.units.shape[1]}
    if not groups or possible_merges(tuple(groups.values())) != ():
        return
    for group in groups.values():
        units = np.concatenate([part.units for part in plan.parts if part.group is group], axis=1)
        held = set(zip(*units.tolist(), strict=True))
        for nbytes in group.sizes:
            meeting = sum((src + nbytes, dst + nbytes) in held for src, dst in zip(*units.tolist(), strict=True))
            if units.shape[1] - meeting != chains(units, nbytes):  # far apart, and out of order
                assert np.ptp(units[1]) >= 4 * units.shape[1] * nbytes
                return
    assert statistics_of(plan).copies.total == plan.descriptors().size.size


@given(plan=all_plans)
def test_extents_hold_what_is_moved(plan):
    made = statistics_of(plan)
    nbytes = made.extents.small_nbytes + made.extents.large_nbytes
    if plan.direction in ("host", "device"):
        assert (nbytes, made.granule_nbytes) == (0, 0)
        return
    parts = [part for part in plan.parts if part.units.shape[1]]
    spare = 0  # bytes of the units that granules have and the plan has not
    for part in parts:
        staging = staging_of(part.group, plan.direction)
        spare += part.group.nbytes * (-part.units.shape[1] % staging.granule_units)
        assert staging.nbytes <= made.granule_nbytes
        assert facts_of(part.group, plan.direction).extents.total == staging.extents.shape[1]
    assert nbytes == plan.nbytes + spare
    assert made.extents.total <= made.runs + sum(
        staging_of(part.group, plan.direction).extents.shape[1] for part in parts
    )


@pytest.mark.parametrize("route", ["device", "push", "pull"])
def test_between_gpu_memories_only_the_route_differs(route):
    sides = (KVLayout.from_tensors(LAYERED, Tensor(zeros(4, 8, 16, 64))) for _ in range(2))
    plan = kvplan.compile(*sides).plan([1, 3], [3, 5])
    made = statistics_of(plan, route)
    assert made == replace(statistics_of(plan), route=route)
    assert (made.extents, made.granule_nbytes) == (Pieces(), 0)
