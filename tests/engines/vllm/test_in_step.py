"""Which hits of the host vLLM's scheduler loads in their step."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import NamedTuple

import pytest

import kvplan
from kvplan.engines.vllm.in_step import (
    MOST_WAITS,
    UNBOUNDED,
    LayerOptions,
    StepBudget,
    StepTimes,
    bound_loads,
    layer_options_of,
)


def test_the_keys_are_checked():
    assert layer_options_of({}) is None
    assert layer_options_of({"load_by_layer": True}) == (None, UNBOUNDED)
    assert layer_options_of({"load_by_layer": True, "load_stall_ms": 5}) == (0.005, UNBOUNDED)
    for wrong in (
        {"load_by_layer": 1},
        {"load_by_layer": True, "load_stall_ms": -1},
        {"load_by_layer": True, "load_stall_ms": math.nan},
        {"load_by_layer": True, "load_stall_ms": True},
    ):
        key = list(wrong)[-1]
        with pytest.raises(kvplan.KVPlanError, match=f"kv_connector_extra_config has '{key}'"):
            layer_options_of(wrong)


def test_vllms_own_key_has_the_types_that_vllm_takes():
    assert layer_options_of({"load_by_layer": True, "sync_load_budget_bytes": "8589934592"}) == (None, 8589934592)


def test_a_hit_waits_for_a_bounded_number_of_steps():
    """vLLM may leave out a hit that was taken, and another connector may load it: then it is taken in every step."""
    budget = StepBudget(LayerOptions(0.005, UNBOUNDED), most_tokens=1000)
    for _ in range(MOST_WAITS):
        budget.decide("stuck", 100, 1, taken=True)
        budget.decide("b", 100, 1, taken=False)
        assert budget.waits("b")
        budget.ran({"running": 1})
    budget.decide("stuck", 100, 1, taken=True)
    budget.decide("b", 100, 1, taken=False)
    assert not budget.waits("b")
    assert not budget.waits_again("b")


def test_hits_behind_the_first_ones_wait_without_a_lookup_and_not_too_many_do():
    budget = StepBudget(LayerOptions(0.005, UNBOUNDED), most_tokens=1000)
    hits = [str(number) for number in range(MOST_WAITS + 3)]
    budget.decide("first", 100, 1, taken=True)
    for hit in hits:
        budget.decide(hit, 100, 1, taken=False)
    assert [budget.waits(hit) for hit in hits] == [True] * MOST_WAITS + [False] * 3
    budget.ran({"first": 100})
    assert not budget.waits_again(hits[0]), "the first one is looked up"
    budget.decide(hits[0], 100, 1, taken=True)
    budget.decide(hits[1], 100, 1, taken=False)
    assert [budget.waits_again(hit) for hit in hits[1:]] == [True] * (MOST_WAITS - 1) + [False] * 3


def test_the_budget_follows_the_steps_and_the_loads():
    """Decoding tells the time of a step, and prompts that of a token; steps that load, and pauses, tell nothing."""
    now = [0.0]
    times = StepTimes(lambda: now[0])
    times.end()  # of a step that nobody noted
    budget = StepBudget(LayerOptions(None, UNBOUNDED), most_tokens=2048, times=times)

    def step(counts, seconds, *loads, ahead=None):
        if counts:
            budget.ran(counts)
        if ahead:  # the next step is made while this one runs
            budget.ran(ahead)
        now[0] += seconds
        budget.ended(*loads)

    step({"b": 1}, 0.020, ahead={"b": 1, "c": 999})
    step(None, 0.030, ahead={"b": 1})
    step(None, 0.020, 5e10, 1.0)
    now[0] += 60
    step({"b": 1}, 0.020)
    assert (times.step_seconds, times.expected(500)) == (pytest.approx(0.020), pytest.approx(0.025))
    assert budget.of("a", new_tokens=100) == pytest.approx(5e10 * (0.020 + 0.001 + 0.020))
    budget.decide("a", 100, 1, taken=True)
    assert budget.of("c", new_tokens=100) == pytest.approx(5e10 * (0.020 + 0.002 + 0.005)), "for both"
    step({"b": 1, "a": 100}, 9.0)  # it waited for loads
    assert budget.of("a", new_tokens=100) == pytest.approx(5e10 * (0.020 + 0.001 + 0.020))
    for _ in range(20):
        step({"b": 1}, 0.030)
    assert times.step_seconds == pytest.approx(0.030, rel=0.01)


class Config(NamedTuple):
    """The members of vLLM's SchedulerOffloadConfig that are read."""

    sync_load_budget_bytes: int = 0
    kv_bytes_per_token: int = 1000
    kv_group_configs: tuple = (SimpleNamespace(tokens_per_block=16), SimpleNamespace(tokens_per_block=32))


@pytest.mark.parametrize(("computed", "hit", "allowed"), [(0, 64, UNBOUNDED), (32, 64, UNBOUNDED), (0, 48, 0)])
def test_a_hit_that_ends_within_a_block_is_not_loaded_in_the_step(computed, hit, allowed):
    """The model writes into that block before the hook."""
    scheduler = SimpleNamespace(config=Config(), _req_status={})
    scheduler._reserve_sync_load = lambda status, computed, hit: bool(scheduler.config.sync_load_budget_bytes)
    budget = StepBudget(LayerOptions(0.005, UNBOUNDED), most_tokens=1000)
    bound_loads(scheduler, budget)
    budget.ran({"ended": 1, "gone": 1})
    scheduler._req_status["ended"] = SimpleNamespace(req=SimpleNamespace(is_finished=lambda: True))
    status = SimpleNamespace(req=SimpleNamespace(num_tokens=200, request_id="a"))
    assert scheduler._reserve_sync_load(status, computed, hit) is (allowed > 0)
    assert scheduler.config.sync_load_budget_bytes == allowed
    # A second hit of the step shares the budget with a first one, and would be alone without it.
    assert (budget.of("b", 200) == UNBOUNDED) is (allowed == 0)
