"""Law 6 on a simulated GPU: shares of ranks by every path, whole and layer by layer."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvplan
from kvplan import Shard
from kvplan.cost.policy import HOST_ROUTES
from kvplan.execute.gpu.resources import Limits
from tests.profiles import examples
from tests.ranks.topologies import fill, reshards, truth_of
from tests.simulated import Device
from tests.simulated.executors import ALL_PATHS, TIGHT, TINY_RING, executor_on, layout_on

# By route: the memory of the ranks of both sides, in turn; None for the host.
PLACES: dict[str, tuple[tuple[int | None, ...], tuple[int | None, ...]]] = {
    "load": ((None,), (0,)), "store": ((0,), (None,)), "push": ((0,), (1, 0)), "pull": ((1, 0), (0,)),
}  # fmt: skip
WAYS = [(path, route) for path in ALL_PATHS for route in PLACES if path != "staged" or route in HOST_ROUTES]


@pytest.mark.parametrize(("path", "route"), WAYS)
@examples(25)
@given(case=reshards(), by_layer=st.booleans(), joined=st.booleans(), seed=st.integers(0, 1000))
def test_every_path_moves_what_every_rank_owes(case, by_layer, joined, seed, path, route):
    """Law 6 for every path of a GPU executor, whole or layer by layer; between live ranks of two GPUs, too."""
    truth, device = truth_of(case), Device(seed, eager=False)
    caches = [[rank.form.build(case.seed + 7 * k) for k, rank in enumerate(side)] for side in case.sides]
    wanted = [rank.form.build(case.seed + 7 * k) for k, rank in enumerate(case.sides[1])]
    for rank, cache in zip(case.sides[0], caches[0], strict=True):
        fill(rank, cache, case.ids[0], case.first[0], truth)
    for rank, cache in zip(case.sides[1], wanted, strict=True):
        fill(rank, cache, case.ids[1], case.first[1], truth)
    shards = [
        [
            Shard(layout_on(cache, device, places[k % len(places)]), rank.cp_rank, rank.cp_size, rank.interleave)
            for k, (rank, cache) in enumerate(zip(side, held, strict=True))
        ]
        for side, held, places in zip(case.sides, caches, PLACES[route], strict=True)
    ]
    plans = kvplan.reshard(*shards).plan(*case.ids, *case.skips)
    if joined and plans and route not in HOST_ROUTES:  # all sources in one submission
        plans = {(0, 0): kvplan.join(list(plans.values()))}
    with executor_on(device, path, limits=Limits(**TIGHT | TINY_RING)) as executor:
        for plan in plans.values():
            executor.submit(plan, by_layer=by_layer)
    for cache, want in zip(caches[1], wanted, strict=True):
        for root, expected in zip(cache.roots, want.roots, strict=True):
            np.testing.assert_array_equal(root, expected)
