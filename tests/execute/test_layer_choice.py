"""The path of a transfer by layers on a simulated GPU: chosen by its groups of layers, and remembered."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvplan
from kvplan import Policy
from kvplan.cost.by_layer import candidates_by_layer, in_sequence
from kvplan.cost.profile import GPU_ROUTES, TERMS, PathCosts, default, route_paths
from kvplan.cost.statistics import counted, halves_statistics, statistics_of
from kvplan.execute.gpu import selection
from kvplan.execute.gpu.resources import Limits
from kvplan.plan.layers import Cutting, split_layers
from tests.paged_caches import Move, Paged
from tests.profiles import examples
from tests.simulated import Device
from tests.simulated.executors import MOVE, OnDevice, Pair, both_ways, executor_on, favouring, pair_on

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


@contextmanager
def asked() -> Iterator[mock.Mock]:
    """Counts how often the model is asked about groups of layers."""
    with mock.patch.object(selection, "candidates_by_layer", wraps=candidates_by_layer) as asking:
        yield asking


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
    assert all(halves_statistics(direction, counted(part)) is None for part in pieces)
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


def test_a_decision_by_layer_is_remembered_for_a_class_of_sizes():
    device = Device()
    cache, pool = replace(CACHE, block=48), replace(POOLS[0], block=48)
    pair = pair_on(device, "load", cache, pool)
    profile = favouring("staged")
    chance = np.random.default_rng(0)
    with executor_on(device, profile=profile, limits=ALWAYS_CUT) as executor, asked() as asking:
        with mock.patch.object(selection.LayerCut, "of", wraps=selection.LayerCut.of) as cutting:
            counts = []
            for count in (32, 33, 32, 36, 40):
                plan = pair.program.plan(chance.permutation(48)[:count], chance.permutation(48)[:count])
                executor._backend.selection.choose(plan, capturing=False, groups=Cutting(6))
                counts.append(asking.call_count)
            assert cutting.call_count == 1, "run groups are cut once"
        assert counts[0] == counts[1] == counts[2] == 1, "33 blocks are as 32"
        assert counts[3:] == [2, 3]
        with mock.patch.object(selection, "counted") as counting:
            executor._backend.selection.choose(plan, capturing=False, groups=Cutting(6))
        assert not counting.call_count
        executor._backend.selection.choose(plan, capturing=False)
        assert asking.call_count == 3, "the whole plan is another decision"


def test_a_prediction_is_scaled_within_a_class_of_sizes():
    device = Device()
    cache, pool = replace(CACHE, block=48), replace(POOLS[0], block=48)
    pair = pair_on(device, "load", cache, pool)
    odd, even = np.arange(48)[::-2], np.arange(48)[::2]
    with executor_on(device, profile=favouring("kernel"), limits=ALWAYS_CUT) as executor:
        choose = executor._backend.selection.choose
        made = [
            choose(pair.program.plan(odd[:count], even[:count]), capturing=False, groups=Cutting(6))
            for count in (16, 17)
        ]
    assert made[0].path is made[1].path
    assert made[0].predicted is not None
    assert made[1].predicted == pytest.approx(made[0].predicted * 17 / 16)


def test_other_groups_are_another_decision():
    device = Device()
    cache, pool = replace(CACHE, block=48, layer=40), replace(POOLS[0], block=48, layer=40)
    plan = pair_on(device, "load", cache, pool).program.plan(np.arange(48)[::-1], np.arange(48))
    with executor_on(device, profile=favouring("kernel"), limits=ALWAYS_CUT) as executor:
        choose = executor._backend.selection.choose
        predicted = [choose(plan, capturing=False, groups=Cutting(8, halvings)).predicted for halvings in (0, 1, 2, 0)]
    assert predicted[0] == predicted[3]
    assert len(set(predicted)) == 3


def test_joined_plans_by_layer_are_decided_once():
    device = Device()
    pairs = [pair_on(device, "load", CACHE, POOLS[0], seed=seed) for seed in (1, 2)]
    with executor_on(device, limits=ALWAYS_CUT) as executor, asked() as asking:
        for _ in range(2):
            executor.submit(kvplan.join([pair.plan(MOVE) for pair in pairs]), by_layer=True).synchronize()
        assert asking.call_count == 1
        for pair in pairs:
            pair.check()


def test_a_decision_by_layer_ends_with_its_layouts():
    device = Device()
    with executor_on(device, limits=ALWAYS_CUT) as executor:
        chosen = executor._backend.selection
        pair = pair_on(device, "load", CACHE, POOLS[0])
        executor.submit(pair.plan(MOVE), by_layer=True).synchronize()
        assert (len(chosen._decided), len(chosen._cuts)) == (1, 1)
        del pair
        gc.collect()
        assert (len(chosen._decided), len(chosen._cuts)) == (0, 0)


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


def test_a_small_transfer_by_layer_is_one_group():
    device = Device()
    pair = pair_on(device, "load", CACHE, POOLS[0])
    with executor_on(device) as executor, asked() as asking:
        assert executor.candidates(pair.plan(MOVE), by_layer=True) == executor.candidates(pair.plan(MOVE))
        executor.submit(pair.plan(Move([1], [2])), by_layer=True).synchronize()
    assert not asking.call_count


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


@both_ways
def test_groups_that_double_are_prepared(direction):
    with doubling(direction, "kernel") as (executor, pair, plan):
        executor.prepare(pair.plan(Move([0], [0])), by_layer=True)
        tables = executor._backend.resources.tables
        ready = set(tables._functions), sum(map(len, tables._known.values()))
        assert sizes_of(executor, plan, 1) == [1, 2, 4, 8, 1]
        assert (set(tables._functions), sum(map(len, tables._known.values()))) == ready


def test_the_profile_of_a_named_path_is_looked_up_when_it_is_prepared():
    device = Device()
    pair = pair_on(device, "load", CACHE, POOLS[0])
    with (
        executor_on(device, path="kernel", limits=ALWAYS_CUT) as executor,
        mock.patch("kvplan.cost.store.find_for", return_value=default()) as find,
    ):
        executor._backend.selection._profile = None
        executor.prepare(pair.plan(MOVE), by_layer=True)
        assert find.call_count == 1
        executor.submit(pair.plan(MOVE), by_layer=True, beside_seconds=1).synchronize()
        assert find.call_count == 1


def test_nothing_doubles_where_no_speed_is_measured():
    with doubling("load") as (executor, pair, plan):
        pageable = pair_on(executor._backend.resources.device, "load", *DEEP, pin=False)
        assert sizes_of(executor, pageable.plan(MOVE), 1) == [2] * 8
        pageable.check()
        assert sizes_of(executor, pair.plan(Move([], [])), 1) == sizes_of(executor, pair.plan(Move([], [])), None)
        choose, profile = executor._backend.selection, executor._backend.selection.profile
        choose._profile = replace(profile, how="default")
        assert choose._hiding(plan, 1.0) is None
        choose._profile = replace(profile, ceilings=profile.ceilings | {"load": 0.0})
        assert choose._hiding(plan, 1.0).copying > 1, "a link without a speed hides nothing"
        choose._profile = profile
        assert choose._hiding(plan, 1.0) == (1.0, pytest.approx(1e-3))
        sides = choose._sides(plan)
        with mock.patch.object(choose, "_sides", return_value=sides._replace(unserved="no GPU reaches it")):
            assert choose._hiding(plan, 1.0) is None
        with mock.patch.object(selection, "_ruled", return_value="copy_engine"):
            assert choose._hiding(plan, 1.0) is None


@pytest.mark.parametrize("seconds", [-1e-9, math.nan, math.inf, "1", True, 10**400, [1.0]])
def test_wrong_seconds_are_refused_before_anything_moves(seconds):
    device = Device()
    pair = pair_on(device, "load", CACHE, POOLS[0])
    with executor_on(device) as executor:
        for call in (executor.submit, executor.candidates):
            with pytest.raises(kvplan.KVPlanError, match=r"beside_seconds is .*; give finite seconds of at least 0"):
                call(pair.plan(MOVE), by_layer=True, beside_seconds=seconds)
        assert executor.stats().transfers == 0
