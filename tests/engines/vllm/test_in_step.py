"""Which hits of the host vLLM's scheduler loads in their step."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import NamedTuple

import pytest

import kvplan
from kvplan.engines.vllm.in_step import UNBOUNDED, LayerOptions, StepBudget, bound_loads, layer_options_of


def test_the_keys_are_checked():
    assert layer_options_of({}) is None
    assert layer_options_of({"load_by_layer": False, "load_stall_ms": 1}) is None
    assert layer_options_of({"load_by_layer": True}) == (None, UNBOUNDED)
    assert layer_options_of({"load_by_layer": True, "load_stall_ms": 5}) == (0.005, UNBOUNDED)
    assert layer_options_of({"load_by_layer": True, "load_stall_ms": 0}) == (0.0, UNBOUNDED)
    for wrong in (
        {"load_by_layer": 1},
        {"load_by_layer": None},
        {"load_by_layer": True, "load_stall_ms": -1},
        {"load_by_layer": True, "load_stall_ms": math.nan},
        {"load_by_layer": True, "load_stall_ms": math.inf},
        {"load_by_layer": True, "load_stall_ms": True},
        {"load_by_layer": True, "sync_load_budget_bytes": 1.5},
        {"load_by_layer": True, "sync_load_budget_bytes": -1},
    ):
        key = list(wrong)[-1]
        with pytest.raises(kvplan.KVPlanError, match=f"kv_connector_extra_config has '{key}'"):
            layer_options_of(wrong)


def test_without_loads_by_layer_vllms_own_key_is_vllms():
    """vLLM makes an int of it, so that a string or a float of JSON has always been right."""
    assert layer_options_of({"sync_load_budget_bytes": "8589934592"}) is None
    assert layer_options_of({"load_by_layer": False, "sync_load_budget_bytes": 8e9}) is None


def test_nothing_waits_behind_a_hit_that_vllm_does_not_run():
    """It would be taken in every step, and the others would wait until it runs."""
    budget = StepBudget(LayerOptions(0.005, UNBOUNDED), most_tokens=1000)
    budget.take("stuck", 100)
    budget.leave("b", 100, 1)
    assert budget.waits("b")
    budget.ran({"running"})
    budget.take("stuck", 100)
    budget.leave("b", 100, 1)
    assert not budget.waits("b")
    assert not budget.waits_again("b")
    budget.ran({"running", "stuck"})
    budget.take("c", 100)
    budget.leave("d", 100, 1)
    assert budget.waits("d")


class Config(NamedTuple):
    """The members of vLLM's SchedulerOffloadConfig that are read."""

    sync_load_budget_bytes: int = 0
    kv_bytes_per_token: int = 1000
    kv_group_configs: tuple = (SimpleNamespace(tokens_per_block=16), SimpleNamespace(tokens_per_block=32))


@pytest.mark.parametrize(("computed", "hit", "allowed"), [(0, 64, UNBOUNDED), (32, 64, UNBOUNDED), (0, 48, 0)])
def test_a_hit_that_ends_within_a_block_is_not_loaded_in_the_step(computed, hit, allowed):
    """The model writes into that block before the hook."""
    scheduler = SimpleNamespace(config=Config())
    scheduler._reserve_sync_load = lambda status, computed, hit: bool(scheduler.config.sync_load_budget_bytes)
    budget = StepBudget(LayerOptions(0.005, UNBOUNDED), most_tokens=1000)
    bound_loads(scheduler, budget)
    status = SimpleNamespace(req=SimpleNamespace(num_tokens=200, request_id="a"))
    assert scheduler._reserve_sync_load(status, computed, hit) is (allowed > 0)
    assert scheduler.config.sync_load_budget_bytes == allowed
    # A second hit of the step shares the budget with a first one, and would be alone without it.
    assert (budget.of("b", 200) == UNBOUNDED) is (allowed == 0)
