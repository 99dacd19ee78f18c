"""Law 6: resharding n ranks to m and back is the identity; every byte has one writer."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import kvplan
from tests.oracle import byte_moves, factored_moves
from tests.profiles import examples
from tests.ranks.mixed_ranks import held_bytes, mixed
from tests.ranks.rank_specs import written
from tests.ranks.topologies import fill, reshards, shards_of, truth_of


@examples(150)
@given(case=reshards())
def test_there_is_the_truth_and_back_is_the_identity(case, executor):
    """Law 6: each rank gets its part of the truth, and the way back restores every rank."""
    truth = truth_of(case)
    caches = [[rank.form.build(case.seed + 7 * k) for k, rank in enumerate(side)] for side in case.sides]
    wanted = [rank.form.build(case.seed + 7 * k) for k, rank in enumerate(case.sides[1])]
    for rank, cache in zip(case.sides[0], caches[0], strict=True):
        fill(rank, cache, case.ids[0], case.first[0], truth)
    elements = sum(
        fill(rank, cache, case.ids[1], case.first[1], truth) for rank, cache in zip(case.sides[1], wanted, strict=True)
    )
    shards = shards_of(case, caches)
    there = kvplan.reshard(*shards)
    assert there.unit_tokens == case.unit
    plans = there.plan(*case.ids, *case.skips)
    assert len(written(plans.values())) == elements * case.logical.itemsize == sum(p.nbytes for p in plans.values())
    for plan in plans.values():
        executor.submit(plan).synchronize()
    for cache, want in zip(caches[1], wanted, strict=True):
        for root, expected in zip(cache.roots, want.roots, strict=True):
            np.testing.assert_array_equal(root, expected)

    for rank, cache in zip(case.sides[0], caches[0], strict=True):
        fill(rank, cache, case.ids[0], case.first[0], truth ^ 0xFF)
    originals = [rank.form.build(case.seed + 7 * k) for k, rank in enumerate(case.sides[0])]
    for rank, cache in zip(case.sides[0], originals, strict=True):
        fill(rank, cache, case.ids[0], case.first[0], truth)
    back = kvplan.reshard(*shards[::-1]).plan(*case.ids[::-1], *case.skips[::-1])
    for plan in back.values():
        executor.submit(plan).synchronize()
    for cache, want in zip(caches[0], originals, strict=True):
        for root, expected in zip(cache.roots, want.roots, strict=True):
            np.testing.assert_array_equal(root, expected)


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
