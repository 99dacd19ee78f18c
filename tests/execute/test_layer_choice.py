"""The path of a transfer by layers: chosen by the sum of its groups of layers, and kept by nobody."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import kvplan
from kvplan import Policy
from kvplan.cost.model import Prices, candidates
from kvplan.cost.policy import layer_edges
from kvplan.cost.profile import GPU_ROUTES, TERMS, DeviceProfile, PathCosts, default, route_paths
from kvplan.cost.statistics import counted
from tests.contract.gpu.caches import DEVICE_NOTATION, PAGE_FIRST, Ids, Paged, both_ways, way
from tests.contract.gpu.machines import Simulated

pytestmark = pytest.mark.slow
LAYERS = 6
LONG = (
    Paged(DEVICE_NOTATION, layer=LAYERS, dim=700_000),
    Paged(PAGE_FIRST, layer=LAYERS, dim=700_000),
)  # 4 blocks: 67 MB


def profile(costs: dict[str, dict[str, float]]) -> DeviceProfile:
    made = {name: PathCosts(each, each, each if name == "kernel" else {}) for name, each in costs.items()}
    return replace(default(), costs={way: {path: made[path] for path in route_paths(way)} for way in GPU_ROUTES})


def priced(chance: np.random.Generator) -> DeviceProfile:
    """Random costs, in which no path wins for all plans."""
    return profile({
        name: {term: 0.0 if term == "byte" else chance.uniform(0, 50_000 if term == "fixed" else 2000)
               for term in terms}
        for name, terms in TERMS.items()
    })  # fmt: skip


@pytest.fixture
def gpu():
    with Simulated() as machine:
        yield machine


@both_ways
def test_the_choice_by_layer_is_that_of_the_sum_of_its_pieces(gpu, route):
    pair, taken = way(gpu, route, *LONG), set()
    for seed in range(4):
        some, plan = priced(np.random.default_rng(seed)), pair.program.plan([3, 1, 8, 5], [0, 7, 2, 4])
        edges = layer_edges(plan.nbytes, LAYERS)
        expected = candidates(counted(plan, edges), route, some, Policy())
        with kvplan.Executor("cuda:0", profile=some) as executor:
            assert executor.candidates(plan, by_layer=True) == expected
            transfer = executor.submit(pair.plan(), by_layer=True)
            assert (transfer.result().path, transfer.result().predicted) == (expected[0].path, expected[0].seconds)
            assert len(transfer.layer_groups) == len(edges) - 1 > 1
        taken.add(expected[0].path)
    assert len(taken) > 1
    pair.check()


@both_ways
def test_a_plan_and_the_same_plan_by_layer_may_take_other_paths(gpu, route):
    """A pool that keeps all layers of a block together: the groups of layers are more and shorter copies."""
    pair = way(gpu, route, *LONG)
    plan = pair.plan(Ids([3, 1, 8, 5], [0, 7, 2, 4]))
    costs = {name: dict.fromkeys(terms, 0.0) | {"fixed": 1e9} for name, terms in TERMS.items()}
    costs["staged"] |= {"fixed": 0.0, "small_extent": 1e6, "large_extent": 1e6}  # a millisecond for each extent
    costs["kernel"]["fixed"] = 2e6 * plan.units  # as long as two extents a unit
    with kvplan.Executor("cuda:0", profile=profile(costs)) as executor:
        taken = [executor.submit(plan, by_layer=by_layer).result().path for by_layer in (False, True, False, True)]
        assert [executor.candidates(plan, by_layer=by_layer)[0].path for by_layer in (False, True)] == taken[:2]
    assert taken == ["staged", "kernel"] * 2
    pair.check()


def test_a_named_path_predicts_its_pieces(gpu):
    pair, some = way(gpu, "load", *LONG), priced(np.random.default_rng(0))
    for path in ("kernel", "staged", "copy_engine"):
        plan, policy = pair.plan(), Policy(path=path)
        with kvplan.Executor("cuda:0", policy, some) as executor:
            predicted = executor.submit(plan, by_layer=True).result().predicted
        assert (
            predicted == Prices(path, "load", some, policy).of(counted(plan, layer_edges(plan.nbytes, LAYERS))).seconds
        )
