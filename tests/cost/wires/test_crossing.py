"""Counts of plans that cross a wire: descriptors as NIXL has them, and the runs of packing's own halves."""

from __future__ import annotations

import numpy as np
import pytest

import kvplan
from kvplan import KVPlanError
from kvplan.cost.wires.crossing import Crossing, crossing_of, sum_of, unit_crossing
from kvplan.plan.packing.packing import packing_of

LAYER_FIRST, BLOCK_FIRST, ROWS = (
    kvplan.KVLayout.from_tensors(notation, np.zeros(shape, np.int8))
    for notation, shape in (
        ("layer block token dim", (4, 32, 16, 64)),
        ("block layer token dim", (32, 4, 16, 64)),
        ("block token layer dim", (32, 16, 4, 64)),
    )
)
PLANS = {
    "one run a layer": (LAYER_FIRST, BLOCK_FIRST, [9, 2, 5], [1, 8, 4]),
    "rows": (LAYER_FIRST, ROWS, [9, 2, 5], [1, 8, 4]),
    "blocks that touch": (BLOCK_FIRST, kvplan.KVLayout.from_spec({"notation": "block layer token dim", "dtype": "int8",
                          "sizes": {"block": 32, "layer": 4, "token": 16, "dim": 64}}), [3, 4, 5, 9], [7, 8, 9, 1]),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("most", [1 << 12, 16 << 20])
def test_it_counts_what_lowering_and_packing_make(name, most):
    src, dst, from_ids, to_ids = PLANS[name]
    plan = kvplan.compile(src, dst).plan(from_ids, to_ids)
    found = crossing_of(plan, most=most)
    packing = packing_of(plan, most=most)
    assert found.nbytes == plan.nbytes
    assert found.descriptors == plan.nixl("src").descriptors == plan.nixl("dst", strided=False).descriptors
    assert (found.units, found.gather_runs, found.scatter_runs) == (
        packing.units, packing.src.facts.copies, packing.dst.facts.copies)  # fmt: skip


def test_a_strided_list_counts_as_often_as_it_repeats():
    plan = kvplan.compile(LAYER_FIRST, BLOCK_FIRST).plan([9, 2], [1, 8])
    assert plan.nixl("src", strided=True).descriptors == crossing_of(plan).descriptors == 8
    assert len(plan.nixl("src", strided=True).rows) == 2


def test_an_order_gives_one_side_long_runs():
    plan = kvplan.compile(LAYER_FIRST, ROWS).plan([9, 2], [1, 8])
    src, dst = (crossing_of(plan, order) for order in ("src", "dst"))
    assert (src.gather_runs, src.scatter_runs) == (8, 128)
    assert (dst.gather_runs, dst.scatter_runs) == (128, 2)
    assert crossing_of(plan) == dst
    with pytest.raises(KVPlanError, match="order is 'left'; give 'src', 'dst' or 'auto'"):
        crossing_of(plan, "left")


def test_a_unit_alone_counts_like_a_plan_of_one_block():
    program = kvplan.compile(LAYER_FIRST, ROWS)
    assert unit_crossing(program.program) == crossing_of(program.plan([4], [9]))


def test_an_empty_plan_and_a_sum():
    empty = crossing_of(kvplan.compile(LAYER_FIRST, ROWS).plan([], []))
    assert empty == Crossing(0, 0, 0, 0, 0)
    one = Crossing(10, 1, 2, 3, 4)
    assert sum_of([one, one, one]) == Crossing(30, 3, 6, 9, 12, 3)
    assert one.unit_nbytes == 10
    assert one.descriptor_nbytes == 5
