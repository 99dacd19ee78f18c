"""Law 3: a packed plan moves what its plan moves, through chunks, also when one half comes from a recipe."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvplan
from kvplan import KVLayout
from kvplan.cost.policy import ROUTES
from kvplan.plan.packing.chunk_half import Slot
from kvplan.plan.packing.pack_checks import Offered
from kvplan.plan.packing.pack_recipe import half_of
from kvplan.plan.packing.packing import packing_of, packings_by_layer
from kvplan.plan.row_plans import Memory, layout_of
from tests import oracle
from tests.compiled_cases import compiled, planned
from tests.plan.packing.rings import Ring, bounds_of, composed, through
from tests.profiles import examples
from tests.ranks.topologies import reshards, shards_of
from tests.simulated.drawn import PATHS, Drawn
from tests.simulated.drawn import executor as gpu_executor
from tests.simulated_driver import simulated
from tests.strategies import cases, neighbour_cases

ORDERS = st.sampled_from(("src", "dst", "auto"))
CUTS = st.sampled_from((256, 600, 4096))
MOST = st.sampled_from((None, 256, 1024, 1 << 16))


@examples(400)
@given(case=cases(), order=ORDERS, most=MOST, nbytes=CUTS)
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
@given(case=cases(), order=ORDERS, most=MOST, nbytes=CUTS)
def test_a_recipe_makes_the_half_that_its_sender_has(case, order, most, nbytes):
    """Law 3: both halves, made from recipes, describe the plan's byte moves."""
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


def assert_recipes_move(plan, order, most, nbytes, packings) -> None:
    """Both processes make their halves of these packings from recipes; together they move what the plan moves."""
    offered = [Offered(dict.fromkeys(pair[side] for pair in plan.layouts)) for side in (0, 1)]
    moves: dict[int, int] = {}
    for packing in packings:
        slot = max(nbytes, packing.unit_nbytes)
        halves = [half_of(packing.recipe(side), its, side) for side, its in zip(("src", "dst"), offered, strict=True)]
        made = composed(*halves, Ring(1, slot), bounds_of(packing, slot))
        assert not made.keys() & moves.keys()
        moves |= made
    assert moves == oracle.factored_moves(plan)


@examples(150)
@given(
    several=st.lists(st.one_of(cases(max_blocks=3), neighbour_cases()), min_size=1, max_size=3),
    groups=st.integers(1, 4),
    order=ORDERS,
    most=MOST,
    nbytes=CUTS,
)
def test_joined_plans_by_layer(several, groups, order, most, nbytes):
    """Laws 3 and 7: the packings of a joined plan's layers move together what the plan moves."""
    plan = kvplan.join([planned(case) for case in several])
    pieces = packings_by_layer(plan, groups, order, most)
    assert [sorted(layers) for layers, _ in pieces] == sorted(sorted(layers) for layers, _ in pieces)
    assert_recipes_move(plan, order, most, nbytes, [packing for _, packing in pieces])


@pytest.mark.parametrize("last", [255, 256, 257, 65_535, 65_536])
def test_numbers_of_units_that_just_fit_into_their_width(last):
    """Law 3 where the largest number of a unit is the last one, or the first one too many, of 8 and of 16 bits."""
    src, dst = (KVLayout.from_tensors("block dim", np.zeros((last + 1, 8), np.uint8)) for _ in range(2))
    plan = kvplan.compile(src, dst).plan([last, 0, 5], [0, last, 7])
    assert_recipes_move(plan, "auto", None, 4096, [packing_of(plan, "auto", None)])


@examples(60)
@given(case=reshards(), order=ORDERS, most=MOST, nbytes=CUTS)
def test_every_pair_of_ranks(case, order, most, nbytes):
    """Laws 3 and 6: each pair of ranks packs what both hold."""
    for program in kvplan.reshard(*shards_of(case)).values():
        plan = program.plan(*case.ids, *case.skips)
        assert_recipes_move(plan, order, most, nbytes, [packing_of(plan, order, most)])


@pytest.mark.parametrize("path", [path for path in PATHS if path != "staged"])
@examples(60)
@given(case=cases(), route=st.sampled_from(ROUTES), order=ORDERS, most=MOST, seed=st.integers(0, 2**32))
def test_every_path_gathers_and_scatters(path, case, route, order, most, seed):
    """Laws 1 to 3: a GPU gathers to its ring and scatters from it, by each path, whatever side is its own."""
    with simulated(2, seed) as driver:
        drawn = Drawn(case, driver, route)
        packing = packing_of(drawn.plan, order, most)
        slot = max(600, packing.unit_nbytes)
        memory = np.zeros(2 * (slot + 512), np.uint8)
        driver.own(memory, 0)
        layout = layout_of([Memory(memory.ctypes.data, memory.nbytes, "cuda:0", memory)])
        slots = [Slot(layout, -(-(memory.ctypes.data + k * (slot + 256)) // 256) * 256, slot) for k in (0, 1)]
        free: list = [None, None]
        with gpu_executor(path) as made:
            for k, (first, last) in enumerate(bounds_of(packing, slot)):
                gathered = made.submit(packing.gather(first, last, slots[k % 2]), after=free[k % 2])
                free[k % 2] = made.submit(packing.scatter(first, last, slots[k % 2]), after=gathered)
            for transfer in free:
                if transfer is not None:
                    transfer.synchronize()
            drawn.check()
