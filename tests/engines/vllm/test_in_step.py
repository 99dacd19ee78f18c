"""Which hits of the host vLLM's scheduler loads in their step."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import NamedTuple

import pytest

import kvplan
from kvplan.engines.vllm.in_step import MOST_PUT_OFF, UNBOUNDED, LayerOptions, StepBudget, bound_loads, layer_options_of
from kvplan.engines.vllm.step_time import Pace


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


def test_a_huge_stall_is_no_bound():
    budget = StepBudget(layer_options_of({"load_by_layer": True, "load_stall_ms": 1e308}), most_tokens=1000)
    budget.learn(Pace(0.002, 1e-5, 1e10))
    budget.ran({"b"})
    assert budget.of("a", 500) == UNBOUNDED


def test_beside_others_a_step_loads_what_its_compute_hides_and_a_stall():
    budget = StepBudget(LayerOptions(0.005, UNBOUNDED), most_tokens=1000)
    budget.learn(Pace(0.002, 1e-5, 1e10))
    budget.learn(None)
    assert budget.of("a", 500) == UNBOUNDED
    budget.take("a", 500)
    assert budget.of("b", 300) == round(1e10 * (0.002 + 0.008 + 0.005))  # shared with a
    assert budget.of("b", 3000) == round(1e10 * (0.002 + 0.010 + 0.005))  # a step has 1,000 tokens
    assert budget.of("a", 500) == UNBOUNDED  # asked again
    budget.ran({"a", "c"})
    assert budget.of("b", 100) == round(1e10 * (0.002 + 0.001 + 0.005))
    budget.finished("a")
    budget.finished("c")
    assert budget.of("b", 100) == UNBOUNDED


@pytest.mark.parametrize(
    ("stall", "step", "allowed"),
    [(None, 0.002, 0.005), (None, 0.020, 0.020), (0.0, 0.020, 0.0), (0.005, 0.020, 0.005), (0.030, 0.020, 0.030)],
)
def test_a_stall_may_be_as_long_as_a_further_step_unless_the_user_bounds_it(stall, step, allowed):
    budget = StepBudget(LayerOptions(stall, UNBOUNDED), most_tokens=1000)
    budget.ran({"b"})
    assert budget.of("a", 500) == round(20e9 * (stall if stall is not None else 0.005))  # no pace is known
    budget.learn(Pace(step, 1e-5, 1e10))
    assert budget.of("a", 500) == round(1e10 * (step + 0.005 + allowed))


def test_only_the_first_hit_of_a_step_may_stall_it_as_long_as_a_further_step():
    budget = StepBudget(LayerOptions(None, UNBOUNDED), most_tokens=1000)
    budget.learn(Pace(0.020, 1e-5, 1e10))
    budget.ran({"running"})
    assert budget.of("a", 500) == round(1e10 * (0.020 + 0.005 + 0.020))
    budget.take("a", 500)
    assert budget.of("b", 200) == round(1e10 * (0.020 + 0.007 + 0.005))


def test_hits_that_a_step_does_not_hide_wait_for_the_next_one():
    """In the order of their arrival; those behind a waiting hit are not looked up again."""
    budget = StepBudget(LayerOptions(0.005, UNBOUNDED), most_tokens=1000)
    budget.learn(Pace(0.010, 1e-5, 1e10))
    budget.ran({"running"})
    fits = round(1e10 * (0.010 + 0.001 + 0.005))
    budget.leave("first", 100, fits)
    assert not budget.waits("first")  # no hit of this step loads in it
    budget.take("first", 100)
    budget.leave("long", 100, fits + 1)
    budget.leave("b", 100, fits)
    budget.leave("c", 100, fits)
    assert [budget.waits(name) for name in ("long", "b", "c")] == [False, True, True]
    assert not budget.waits_again("d")  # it has just arrived
    budget.ran({"running", "first"})
    assert not any(budget.waits(name) for name in ("b", "c"))
    assert not budget.waits_again("b")  # it is asked for its load
    budget.take("b", 100)
    assert not budget.waits_again("c")
    budget.leave("c", 100, fits)
    budget.ran({"running", "first", "b"})
    budget.take("another", 100)
    assert not budget.waits_again("c")
    budget.leave("c", 100, fits)
    budget.leave("e", 100, fits)
    budget.ran({"running", "another"})
    budget.take("c", 100)
    budget.leave("f", 100, fits)
    assert budget.waits_again("e")
    assert not budget.waits_again("g")


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


def test_nothing_waits_where_another_connector_loads_hits():
    """vLLM's MultiConnector asks every connector, and lets the first one that has found something load it."""
    budget = StepBudget(LayerOptions(None, UNBOUNDED), most_tokens=2048)
    budget.learn(Pace(0.010, 1e-5, 5e10))
    budget.ran({"decoding"})
    budget.take("remote", 512)
    budget.allocated("decoding", 0)
    budget.leave("before it is known", 512, nbytes=1000)
    assert budget.waits("before it is known")
    budget.allocated("remote", 0)
    before = budget.of("host", 512)
    budget.take("host", 512)
    assert before == budget.of("host", 512), "the hit of the other connector takes nothing of the step"
    budget.allocated("host", 6000)
    budget.leave("next", 512, nbytes=1000)
    assert not budget.waits("next")
    budget.ran({"decoding", "host"})
    budget.take("host", 512)
    budget.leave("later", 512, nbytes=1000)
    assert not budget.waits("later")


def test_so_many_hits_wait_and_further_ones_load_asynchronously():
    budget = StepBudget(LayerOptions(0.005, UNBOUNDED), most_tokens=1000)
    budget.take("first", 100)
    names = [str(number) for number in range(MOST_PUT_OFF + 2)]
    for name in names:
        budget.leave(name, 100, 1)
    assert [budget.waits(name) for name in names] == [True] * MOST_PUT_OFF + [False] * 2
    budget.ran({"first"})
    budget.take(names[0], 100)
    budget.leave("new", 100, 1)
    assert all(budget.waits_again(name) for name in names[1:MOST_PUT_OFF])


def test_the_users_own_bound_holds_always():
    budget = StepBudget(LayerOptions(0.005, 1 << 20), most_tokens=1000)
    assert budget.of("a", 500) == 1 << 20
    budget.ran({"b"})
    assert budget.of("a", 500) == 1 << 20


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


def test_a_second_hit_waits_if_the_next_step_can_load_it():
    scheduler = SimpleNamespace(config=Config())
    used = []

    def reserve(status, computed, hit):
        fits = sum(used) + hit * scheduler.config.kv_bytes_per_token <= scheduler.config.sync_load_budget_bytes
        used.extend([hit * scheduler.config.kv_bytes_per_token] * fits)
        return fits

    scheduler._reserve_sync_load = reserve
    budget = StepBudget(LayerOptions(0.005, UNBOUNDED), most_tokens=1000)
    budget.learn(Pace(0.0, 1e-6, 1e8))  # 500,000 bytes of stall
    budget.ran({"running"})
    bound_loads(scheduler, budget)
    asked = {}
    for name, hit, tokens in (
        ("a", 320, 400),
        ("b", 320, 400),
        ("all", 320, 320),
        ("long", 640, 700),
        ("part", 16, 99),
    ):
        status = SimpleNamespace(req=SimpleNamespace(num_tokens=tokens, request_id=name))
        asked[name] = scheduler._reserve_sync_load(status, 0, hit), budget.waits(name)
    # "all" has no token to compute, "long" fits into no step beside others, "part" ends within a block.
    assert asked == {"a": (True, False), "b": (False, True), "all": (False, False), "long": (False, False),
                     "part": (False, False)}  # fmt: skip


@pytest.mark.parametrize("hit", [0, None])
def test_no_hit_asks_for_nothing(hit):
    scheduler = SimpleNamespace(config=None, _reserve_sync_load=lambda status, computed, hit: False)
    budget = StepBudget(LayerOptions(0.005, UNBOUNDED), most_tokens=1000)
    bound_loads(scheduler, budget)
    assert scheduler._reserve_sync_load(None, 0, hit) is False
    assert budget.of("a", 100) == UNBOUNDED  # no request of the step loads
