"""Counts of plans that cross a wire: descriptors as NIXL has them, and the runs of packing's own halves."""

from __future__ import annotations

import numpy as np
import pytest

import kvplan
from kvplan.cost.wire import crossing_of
from kvplan.plan.packing import sections_of

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
    sections = [(part.units.shape[1], one) for part in plan.parts for one in sections_of(part.group, most)]
    assert found.nbytes == plan.nbytes
    assert found.descriptors == plan.nixl("src").descriptors == plan.nixl("dst", strided=False).descriptors
    assert (found.units, found.gather_runs, found.scatter_runs) == (
        sum(units for units, _ in sections),
        *(sum(units * getattr(one, side).packed.shape[1] for units, one in sections) for side in ("src", "dst")),
    )
