"""Law 3: a packed plan moves what its plan moves, through chunks, also when one half comes from a recipe."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvplan.plan.packing.pack_recipe import half_of
from kvplan.plan.packing.packing import packing_of
from tests import oracle
from tests.compiled_cases import compiled
from tests.plan.packing.rings import Ring, bounds_of, composed, through
from tests.profiles import examples
from tests.strategies import cases

ORDERS = ("src", "dst", "auto")
MOST = st.sampled_from((None, 256, 1024, 1 << 16))


@examples(400)
@given(case=cases(), order=st.sampled_from(ORDERS), most=MOST, nbytes=st.sampled_from((256, 600, 4096)))
def test_gather_and_scatter_are_the_plan(case, order, most, nbytes, executor):
    """Law 3: what is gathered into chunks and scattered from them is what the plan copies."""
    src, dst, _, plan = compiled(case)
    expected = case.dst.build(case.seed + 1)
    oracle.copy(src, expected, case.src_ids, case.dst_ids, case.src_skip, case.dst_skip, case.unit_tokens, case.units)
    before = [root.copy() for root in src.roots]
    packing = packing_of(plan, order, most)
    assert packing.nbytes == plan.nbytes
    if most is not None:
        assert packing.unit_nbytes <= most
    slot = max(nbytes, packing.unit_nbytes)
    ring = Ring(2, slot)
    through(executor, packing.src, packing.dst, ring, bounds_of(packing, slot))
    for got, want in zip([*dst.roots, *src.roots], [*expected.roots, *before], strict=True):
        np.testing.assert_array_equal(got, want)


@examples(250)
@given(case=cases(), order=st.sampled_from(ORDERS), most=MOST, nbytes=st.sampled_from((256, 600, 4096)))
def test_a_recipe_makes_the_half_that_its_sender_has(case, order, most, nbytes):
    """Law 3: both halves, made from recipes, describe the plan\'s byte moves."""
    _, _, program, plan = compiled(case)
    packing = packing_of(plan, order, most)
    slot = max(nbytes, packing.unit_nbytes)
    ring, bounds = Ring(1, slot), bounds_of(packing, slot)
    layouts = {"src": program.src, "dst": program.dst}
    halves = [half_of(packing.recipe(side), [layout], side) for side, layout in layouts.items()]
    for mine, made in zip((packing.src, packing.dst), halves, strict=True):
        assert (made.sizes, made.cuts(slot)) == (mine.sizes, mine.cuts(slot))
        for one, other in zip(mine.sections, made.sections, strict=True):
            for name in ("runs", "src", "dst", "alignment"):
                assert getattr(one.group, name) == getattr(other.group, name)
            assert one.addresses.tolist() == other.addresses.tolist()
    expected = oracle.factored_moves(plan)
    assert composed(*halves, ring, bounds) == expected
    assert composed(packing.src, packing.dst, ring, bounds) == expected
