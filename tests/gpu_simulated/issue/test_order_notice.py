"""An order of the host side that costs is logged once a program, by a thread that no submit waits for."""

from __future__ import annotations

import gc
import logging
import threading
import weakref
from dataclasses import replace

import pytest

import kvplan
from kvplan import KVLayout
from kvplan.cost.profile import default
from kvplan.cost.store import by_name
from kvplan.execute.gpu import order_notice
from tests.patience import until
from tests.simulated import Device
from tests.simulated.executors import MOVE, executor_on, pair_on

SIZES = {"layer": 32, "block": 512, "token": 16, "head": 8, "dim": 128}
H100 = by_name("h100")
PACKED = {"notation": "layer: kv block head dim.0 token dim.1", "device": "cuda:0", "sizes": SIZES | {"dim.1": 8}}


def program(host: str, route: str) -> kvplan.CopyProgram:
    """A cache with x-packed keys on a GPU, and a pool."""
    split = {"dim.1": 8} if "dim.1" in host else {}
    gpu, pool = KVLayout.from_spec(PACKED), KVLayout.from_spec({"notation": host, "sizes": SIZES | split})
    return kvplan.compile(*((pool, gpu) if route == "load" else (gpu, pool)))


@pytest.fixture
def searched(monkeypatch):
    """Let every search run at once, and count them."""
    found = []

    def run(search, arguments):
        found.append(arguments)
        thread = threading.Thread(target=search, args=arguments)
        thread.start()
        thread.join()

    monkeypatch.setattr(order_notice, "thread_started", run)
    return found


def told(caplog):
    return [record for record in caplog.records if "kvplan advise" in record.getMessage()]


def ask(plan, seconds=None):
    route = plan.direction
    predicted = 10 * plan.nbytes / (H100.ceilings[route] * 1e9) if seconds is None else seconds
    order_notice.notice(plan, route, predicted, H100, kvplan.Policy())


@pytest.mark.parametrize("route", ["load", "store"])
def test_it_is_logged_once_a_program(caplog, searched, route):
    made = program("block layer kv token head dim", route)
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            ask(made.plan(range(64), range(64)))
    (record,) = told(caplog)
    assert record.levelno == logging.WARNING
    assert record.kvplan_notation == "block layer kv head dim.0 token dim.1"
    assert record.getMessage().startswith(f"a {route} of 4,096 tokens is predicted to take ")
    assert "'block layer kv token head dim', blocks of 16 tokens" in record.getMessage()
    assert len(searched) == 1
    assert not any(layout.tensors for layout in searched[0][:2])


def test_the_best_order_is_not_logged(caplog, searched):
    made = program("block layer kv head dim.0 token dim.1", "load")
    with caplog.at_level(logging.INFO):
        ask(made.plan(range(64), range(64)))
    assert len(searched) == 1
    assert not told(caplog)


def test_a_plan_near_the_link_is_not_looked_at(searched):
    made = program("block layer kv token head dim", "load")
    plan = made.plan(range(64), range(64))
    least = plan.nbytes / (H100.ceilings["load"] * 1e9)
    ask(plan, 1.9 * least)
    ask(made.plan([0], [0]), 9e-5)  # little time is lost
    assert not searched
    ask(plan, 2.1 * least)
    assert len(searched) == 1


def test_other_routes_are_not_looked_at(searched):
    plan = program("block layer kv token head dim", "load").plan([0], [0])
    order_notice.notice(plan, "device", 1.0, H100, kvplan.Policy())
    assert not searched


def test_all_programs_of_a_joined_plan(searched):
    plans = [program(host, "load").plan([0], [k]) for k, host in enumerate(
        ("block layer kv token head dim", "block kv layer token head dim"))]  # fmt: skip
    ask(replace(plans[0], programs=(*plans[0].programs, *plans[1].programs)), 1.0)
    assert len(searched) == 2


def test_an_error_of_the_search_changes_nothing(caplog, searched, monkeypatch):
    def fail(*arguments):
        raise ValueError("no order")

    monkeypatch.setattr("kvplan.advise.faster_order.faster_order", fail)
    with caplog.at_level(logging.DEBUG):
        ask(program("block layer kv token head dim", "load").plan([0], [0]), 1.0)
    assert not told(caplog)
    assert [record for record in caplog.records if record.getMessage() == "no faster order was searched"]


def test_without_a_thread_nothing_is_said(monkeypatch):
    monkeypatch.setattr(order_notice, "thread_started", lambda *arguments: False)
    ask(program("block layer kv token head dim", "load").plan([0], [0]), 1.0)


def test_a_submit_of_an_executor_asks(monkeypatch):
    asked = []
    monkeypatch.setattr("kvplan.execute.gpu.selection.notice", lambda *given: asked.append(given))
    device = Device()
    pair = pair_on(device, "load")
    with executor_on(device) as executor:
        for _ in range(2):  # the second submit takes the decision of the first
            executor.submit(pair.plan(MOVE)).synchronize()
    ((plan, route, predicted, profile, policy),) = asked
    assert (route, profile, policy.path) == ("load", default(), "auto")
    assert predicted > 0
    assert plan.programs


def test_the_search_keeps_no_memory_alive():
    device = Device()
    pair = pair_on(device, "load")
    compiled = pair.program
    gone = weakref.ref(compiled)
    order_notice.notice(pair.plan(MOVE), "load", 1.0, H100, kvplan.Policy())
    assert compiled.advised
    del pair, compiled
    until(lambda: gc.collect() is not None and gone() is None)
