"""The counts of a plan that the cost model reads, against what its lowerings really hold."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvplan
from kvplan import KVLayout
from kvplan.cost.model import features
from kvplan.cost.policy import HOST_ROUTES
from kvplan.cost.statistics import counted
from kvplan.plan.layers import even_edges, split_layers
from kvplan.plan.plan import Plan
from tests.simulated.objects import Tensor
from tests.strategies import Case, cases, neighbour_cases

LAYERED = "layer block token dim"  # layers outermost: a block is a run a layer
PAGED = "block layer token dim"  # blocks outermost: a block is contiguous


def zeros(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.int8)


# 4 layers of 8 blocks of 16 tokens of 64 bytes: a run of one layer and block has 1,024 bytes, a block 4,096.


@pytest.mark.parametrize("by", HOST_ROUTES)
def test_layer_first_to_page_first(by):
    device = KVLayout.from_tensors(LAYERED, Tensor(zeros(4, 8, 16, 64)))
    host = KVLayout.from_tensors(PAGED, zeros(8, 4, 16, 64))
    plan = kvplan.compile(*((device, host) if by == "store" else (host, device))).plan([1, 3, 6], [3, 4, 7])
    ((facts, units),) = counted(plan)
    assert (facts.nbytes, facts.granule_nbytes, units) == (4096, 4096, 3)
    assert facts.terms == {
        "kernel": (4, 4096), "copy_engine": (4, 0, 4096), "copy_engine_2d": (1, 4, 4096), "staged": (1, 0, 4096),
    }  # fmt: skip
    ((facts, _),) = counted(plan, (0, 1, 4))
    assert facts.terms["staged"] == (2, 0, 4096)  # a block of the host has two pieces


def test_larger_host_blocks_hold_several_units():
    device = KVLayout.from_tensors(LAYERED, Tensor(zeros(4, 8, 16, 64)))
    host = KVLayout.from_tensors(PAGED, zeros(4, 4, 64, 64))
    ((facts, units),) = counted(kvplan.compile(device, host).plan(range(8), [2, 0]))
    assert (units, facts.granule_nbytes, facts.terms["staged"]) == (8, 16_384, (0.25, 0, 4096))


@pytest.mark.parametrize(("dim", "large"), [(28 << 10, 1), ((28 << 10) - 1, 0)])
def test_large_pieces_begin_at_28_kib(dim, large):
    sides = [zeros(8, dim), zeros(8, dim)]
    plan = kvplan.compile(
        KVLayout.from_tensors("block dim", sides[0]), KVLayout.from_tensors("block dim", Tensor(sides[1]))
    ).plan([1, 4], [2, 6])
    assert features("copy_engine", counted(plan)) == (1, 2 - 2 * large, 2 * large, 2 * dim)


def planned(case: Case, direction: str) -> Plan:
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


all_plans = st.builds(planned, st.one_of(cases(), neighbour_cases()), st.sampled_from(("load", "store", "device")))


@given(plan=all_plans)
def test_every_count_is_bounded_by_the_lowerings(plan):
    counts = counted(plan)
    if not counts:
        return
    _, runs, nbytes = features("kernel", counts)
    assert nbytes == plan.nbytes
    assert runs == sum(part.group.packed[0].size * part.units.shape[1] for part in plan.parts)
    _, small, large, _ = features("copy_engine", counts)
    assert small + large == runs >= plan.descriptors().size.size  # units that touch are merged
    _, calls, rows, _ = features("copy_engine_2d", counts)
    assert (calls, rows) == (len(plan.strided()), plan.strided().height.sum())
    assert ("staged" in counts[0][0].terms) == (plan.direction in HOST_ROUTES)
    addresses = np.concatenate(plan.descriptors())
    assert not np.any(addresses % min(facts.alignment for facts, _ in counts))


@given(plan=all_plans, groups=st.integers(1, 4))
def test_by_layer_a_plan_counts_as_its_pieces(plan, groups):
    edges = even_edges(len(plan.layers), groups)
    pieces = [piece for _, piece in split_layers(plan, edges) if piece.nbytes]
    for path in ("kernel", "copy_engine", "copy_engine_2d", *(["staged"] if plan.direction in HOST_ROUTES else [])):
        if pieces:
            sums = map(sum, zip(*(features(path, counted(piece))[1:] for piece in pieces), strict=True))
            assert features(path, counted(plan, edges))[1:] == pytest.approx(tuple(sums))
