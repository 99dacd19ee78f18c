"""Law 6: resharding n ranks to m and back is the identity; every byte has one writer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvplan
from kvplan import Shard
from kvplan.cost.policy import HOST_ROUTES
from tests.compiled_cases import assert_same
from tests.oracle import byte_moves, factored_moves
from tests.profiles import examples
from tests.ranks.mixed_ranks import held_bytes, mixed
from tests.ranks.rank_specs import written
from tests.ranks.topologies import fill, reshards, shards_of, truth_of
from tests.simulated.drawn import PATHS, executor, layout_on, ring_of
from tests.simulated_driver import simulated


def caches_of(case, side, truth=None):
    """New caches of a side's ranks, and with the truth in them how many elements that is."""
    caches = [rank.form.build(case.seed + 7 * k) for k, rank in enumerate(case.sides[side])]
    if truth is None:
        return caches, 0
    pairs = zip(case.sides[side], caches, strict=True)
    return caches, sum(fill(rank, cache, case.ids[side], case.first[side], truth) for rank, cache in pairs)


@examples(150)
@given(case=reshards())
def test_there_is_the_truth_and_back_is_the_identity(case, executor):
    """Law 6: each rank gets its part of the truth, and the way back restores every rank."""
    truth = truth_of(case)
    caches = [caches_of(case, 0, truth)[0], caches_of(case, 1)[0]]
    wanted, elements = caches_of(case, 1, truth)
    shards = shards_of(case, caches)
    there = kvplan.reshard(*shards)
    assert there.unit_tokens == case.unit
    plans = there.plan(*case.ids, *case.skips)
    assert len(written(plans.values())) == elements * case.logical.itemsize == sum(p.nbytes for p in plans.values())
    for plan in plans.values():
        executor.submit(plan).synchronize()
    assert_same(caches[1], wanted)

    for rank, cache in zip(case.sides[0], caches[0], strict=True):
        fill(rank, cache, case.ids[0], case.first[0], truth ^ 0xFF)
    back = kvplan.reshard(*shards[::-1]).plan(*case.ids[::-1], *case.skips[::-1])
    for plan in back.values():
        executor.submit(plan).synchronize()
    assert_same(caches[0], caches_of(case, 0, truth)[0])


@examples(150)
@given(seed=st.integers(0, 2**32))
def test_every_byte_comes_once_from_the_rank_whose_turn_it_is(seed):
    """Law 6 for ranks that are not alike: each byte has one writer, the replica whose turn it is."""
    case = mixed(seed)
    programs = kvplan.reshard(*case.sides)
    held, wanted = (
        [held_bytes(rank, ids, skip, case.tokens) for rank, ids in zip(ranks, lists, strict=True)]
        for ranks, lists, skip in zip(case.sides, case.ids, case.skips, strict=True)
    )
    contents = [{content for content, _ in each.values()} for each in held]
    skips = [skip // programs.unit_tokens for skip in case.skips]
    moved = 0
    for (s, d), program in programs.items():
        plan = program.plan(case.ids[0][s], case.ids[1][d], *skips)
        moves = factored_moves(plan)  # of the units as they are, since a pair joins without looking
        assert moves == byte_moves(plan.descriptors())
        for to, origin in moves.items():
            content, block = wanted[d][to]
            assert held[s][origin][0] == content
            holders = [k for k, some in enumerate(contents) if content in some]
            assert holders[block % len(holders)] == s
        moved += len(moves)
    assert moved == sum(map(len, wanted))


# By route: the memory of the ranks of both sides, in turn; None for the host.
MEMORIES: dict[str, tuple[tuple[int | None, ...], tuple[int | None, ...]]] = {
    "load": ((None,), (0,)), "store": ((0,), (None,)), "push": ((0,), (1, 0)), "pull": ((1, 0), (0,)),
}  # fmt: skip
ROUTES = [(path, route) for path in PATHS for route in MEMORIES if path != "staged" or route in HOST_ROUTES]


@pytest.mark.parametrize(("path", "route"), ROUTES)
@examples(25)
@given(
    case=reshards(), by_layer=st.booleans(), joined=st.booleans(), slots=st.integers(1, 4), seed=st.integers(0, 1000)
)
def test_every_path_moves_what_every_rank_owes(case, by_layer, joined, slots, seed, path, route):
    """Law 6 for every path of a GPU executor; between live ranks of two GPUs, too."""
    truth = truth_of(case)
    caches = [caches_of(case, 0, truth)[0], caches_of(case, 1)[0]]
    with simulated(2, seed) as driver:
        shards = [
            [
                Shard(layout_on(cache, driver, places[k % len(places)]), rank.cp_rank, rank.cp_size, rank.interleave)
                for k, (rank, cache) in enumerate(zip(side, held, strict=True))
            ]
            for side, held, places in zip(case.sides, caches, MEMORIES[route], strict=True)
        ]
        plans = list(kvplan.reshard(*shards).plan(*case.ids, *case.skips).values())
        if joined and plans and route not in HOST_ROUTES:  # all sources in one submission
            plans = [kvplan.join(plans)]
        with executor(path, **ring_of(path, *plans, slots=slots)) as made:
            for plan in plans:
                made.submit(plan, by_layer=by_layer)
    assert_same(caches[1], caches_of(case, 1, truth)[0])
