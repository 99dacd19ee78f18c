"""Law 6 on simulated GPUs: shares of ranks by every path, whole and layer by layer."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvplan
from kvplan import Shard
from kvplan.cost.policy import HOST_ROUTES
from tests.profiles import examples
from tests.ranks.topologies import fill, reshards, truth_of
from tests.simulated.drawn import PATHS, executor, layout_on, ring_of
from tests.simulated_driver import simulated

# By route: the memory of the ranks of both sides, in turn; None for the host.
PLACES: dict[str, tuple[tuple[int | None, ...], tuple[int | None, ...]]] = {
    "load": ((None,), (0,)), "store": ((0,), (None,)), "push": ((0,), (1, 0)), "pull": ((1, 0), (0,)),
}  # fmt: skip
WAYS = [(path, route) for path in PATHS for route in PLACES if path != "staged" or route in HOST_ROUTES]


@pytest.mark.parametrize(("path", "route"), WAYS)
@examples(25)
@given(
    case=reshards(), by_layer=st.booleans(), joined=st.booleans(), slots=st.integers(1, 4), seed=st.integers(0, 1000)
)
def test_every_path_moves_what_every_rank_owes(case, by_layer, joined, slots, seed, path, route):
    """Law 6 for every path of a GPU executor; between live ranks of two GPUs, too."""
    truth = truth_of(case)
    caches = [[rank.form.build(case.seed + 7 * k) for k, rank in enumerate(side)] for side in case.sides]
    wanted = [rank.form.build(case.seed + 7 * k) for k, rank in enumerate(case.sides[1])]
    for rank, cache in zip(case.sides[0], caches[0], strict=True):
        fill(rank, cache, case.ids[0], case.first[0], truth)
    for rank, cache in zip(case.sides[1], wanted, strict=True):
        fill(rank, cache, case.ids[1], case.first[1], truth)
    with simulated(2, seed) as driver:
        shards = [
            [
                Shard(layout_on(cache, driver, places[k % len(places)]), rank.cp_rank, rank.cp_size, rank.interleave)
                for k, (rank, cache) in enumerate(zip(side, held, strict=True))
            ]
            for side, held, places in zip(case.sides, caches, PLACES[route], strict=True)
        ]
        plans = list(kvplan.reshard(*shards).plan(*case.ids, *case.skips).values())
        if joined and plans and route not in HOST_ROUTES:  # all sources in one submission
            plans = [kvplan.join(plans)]
        with executor(path, **ring_of(path, *plans, slots=slots)) as made:
            for plan in plans:
                made.submit(plan, by_layer=by_layer)
    for cache, want in zip(caches[1], wanted, strict=True):
        for root, expected in zip(cache.roots, want.roots, strict=True):
            np.testing.assert_array_equal(root, expected)
