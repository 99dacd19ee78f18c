"""The path of a transfer by layers on a simulated GPU: chosen by its groups of layers, and remembered."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvplan
from kvplan import Policy
from kvplan.cost.by_layer import candidates_by_layer, in_sequence
from kvplan.cost.profile import GPU_ROUTES, TERMS, PathCosts, default, route_paths
from kvplan.cost.statistics import statistics_of
from kvplan.execute.gpu.resources import Limits
from kvplan.plan.layers import split_layers
from tests.paged_caches import Move, Paged
from tests.profiles import examples
from tests.simulated import Device
from tests.simulated.executors import MOVE, OnDevice, Pair, both_ways, executor_on, pair_on

ALWAYS_CUT = Limits(layer_group_nbytes=1)
LAYERS = 6
CACHE = OnDevice("layer: block kv token head dim", layer=LAYERS)
POOLS = [Paged("block layer kv token head dim", layer=LAYERS), Paged("layer block kv token head dim", layer=LAYERS)]


DEEP = replace(CACHE, layer=16), replace(POOLS[0], layer=16)


def priced(chance: np.random.Generator) -> kvplan.cost.profile.DeviceProfile:
    """Random costs, in which no path wins for all plans."""
    costs = {}
    for name, terms in TERMS.items():
        each = {term: 0.0 if term.endswith("byte") else chance.uniform(0, 2000) for term in terms}
        each["fixed"] = chance.uniform(0, 50_000)
        costs[name] = PathCosts(each, each, each, each if name == "kernel" else {})
    return replace(default(), costs={way: {path: costs[path] for path in route_paths(way)} for way in GPU_ROUTES})


@both_ways
@pytest.mark.parametrize("pool", POOLS)
@examples(40)
@given(seed=st.integers(0, 2**32), count=st.integers(1, 6), groups=st.integers(2, 7))
def test_the_choice_by_layer_is_that_of_the_list_of_pieces(direction, pool, seed, count, groups):
    chance, device = np.random.default_rng(seed), Device()
    pair, profile = pair_on(device, direction, CACHE, pool), priced(chance)
    plan = pair.plan(Move(*(chance.permutation(8)[:count].tolist() for _ in range(2))))
    limits = Limits(layer_groups=groups, layer_group_nbytes=1)
    pieces = [part for _, part in split_layers(plan, groups)]
    assert len(pieces) == min(groups, LAYERS)
    statistics = [statistics_of(part) for part in pieces]
    expected = candidates_by_layer(statistics, profile, Policy())
    with executor_on(device, profile=profile, limits=limits) as executor:
        assert executor.candidates(plan, by_layer=True) == expected
        assert executor.candidates(plan)[0].groups == 1
        result = executor.submit(plan, by_layer=True).result()
        assert (result.path, result.predicted) == (expected[0].path, expected[0].seconds)
        pair.check()


@both_ways
def test_a_plan_and_the_same_plan_by_layer_may_take_other_paths(direction):
    """A pool that keeps all layers of a block together: the groups of layers are more and shorter copies."""
    device = Device()
    pair = pair_on(device, direction, CACHE, POOLS[0])
    plan = pair.plan(MOVE)
    costs = {name: dict.fromkeys(terms, 0.0) | {"fixed": 1e9} for name, terms in TERMS.items()}
    costs["staged"] |= {"fixed": 0.0, "small_extent": 1e6, "large_extent": 1e6}  # a millisecond for each extent
    costs["kernel"]["fixed"] = 1e6 * plan.units * 2 / LAYERS  # as long as two extents, if it is launched 6 times
    made = {name: PathCosts(each, each, each, each if name == "kernel" else {}) for name, each in costs.items()}
    profile = replace(default(), costs={way: {path: made[path] for path in route_paths(way)} for way in GPU_ROUTES})
    with executor_on(device, profile=profile, limits=ALWAYS_CUT) as executor:
        for _ in range(2):
            taken = [executor.submit(plan, by_layer=by_layer).result().path for by_layer in (False, True)]
            assert [executor.candidates(plan, by_layer=by_layer)[0].path for by_layer in (False, True)] == taken
        pair.check()
    assert taken[1] == "kernel"


@pytest.mark.parametrize("path", ["kernel", "staged", "copy_engine"])
def test_a_named_path_predicts_its_pieces(path):
    device = Device()
    pair = pair_on(device, "load", CACHE, POOLS[0])
    plan, profile = pair.plan(MOVE), priced(np.random.default_rng(0))
    pieces = [statistics_of(part) for _, part in split_layers(plan, 16)]
    with executor_on(device, path, profile, limits=ALWAYS_CUT) as executor:
        predicted = executor.submit(plan, by_layer=True).result().predicted
        whole = executor.submit(plan).result().predicted
    assert predicted == in_sequence(path, pieces, profile, Policy(path=path)).seconds
    assert whole != predicted


@contextmanager
def doubling(direction: str, path: str = "auto") -> Iterator[tuple[kvplan.Executor, Pair, kvplan.Plan]]:
    """An executor whose groups may double, and a plan that its made-up link moves in a millisecond."""
    device = Device()
    pair = pair_on(device, direction, *DEEP)
    plan = pair.plan(MOVE)
    profile = replace(default(), how="shipped", ceilings=default().ceilings | {direction: plan.nbytes / 1e6})
    limits = Limits(layer_group_nbytes=1, halved_nbytes=plan.nbytes, halved_piece_nbytes=1)
    with executor_on(device, path, profile, limits=limits) as executor:
        yield executor, pair, plan


def sizes_of(executor: kvplan.Executor, plan: kvplan.Plan, seconds: float | None) -> list[int]:
    transfer = executor.submit(plan, by_layer=True, beside_seconds=seconds)
    transfer.synchronize()
    return [len(layers) for layers in transfer.layer_groups]


@both_ways
def test_groups_double_where_the_compute_hides_the_copies(direction):
    with doubling(direction) as (executor, pair, plan):
        sizes = {}
        for seconds in (None, 0, 2.99e-3, 3e-3, np.float32(1)):
            sizes[seconds] = sizes_of(executor, plan, seconds)
            pair.check()
        assert sizes == {None: [2] * 8, 0: [2] * 8, 2.99e-3: [2] * 8, 3e-3: [1, 2, 4, 8, 1], 1: [1, 2, 4, 8, 1]}
        assert executor.submit(plan, beside_seconds=1).result().launches < 8, "by layer only"
        groups = [executor.candidates(plan, by_layer=True, beside_seconds=told)[0].groups for told in (None, 1)]
        assert groups == [8, 5]
        device = executor._backend.resources.device
        device.is_current = lambda: False
        assert sizes_of(executor, plan, 1) == [1, 2, 4, 8, 1]
        del device.is_current
