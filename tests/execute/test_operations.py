"""What an operator sees: metrics, logs, ranges."""

from __future__ import annotations

import gc
import logging
import sys
import threading
import weakref
from types import SimpleNamespace

import pytest

import kvplan
from kvplan import KVPlanError, TransferError
from kvplan.execute import stats as tally
from kvplan.execute.stats import ExecutorStats
from tests.execute.host_processes import Broken, pair

FLOW_LABELS = {"executor": "a", "path": "host", "direction": "host"}


# Stats.


# Metrics.


@pytest.fixture
def registry():
    client = pytest.importorskip("prometheus_client", reason="pip install prometheus-client")
    return client.CollectorRegistry()


def collector(sources):
    from kvplan.execute.metrics import Collector

    return Collector(sources)


def test_a_scrape_says_what_happened(registry):
    _, _, program = pair()
    gate = threading.Event()
    with kvplan.Executor() as executor:
        registry.register(collector({"a": executor.stats}))
        for k in range(3):
            executor.submit(program.plan([k], [k])).synchronize()
        with pytest.raises(TransferError):
            executor.submit(program.plan([1], [1]), after=Broken()).synchronize()
        executor.submit(program.plan([1], [1]), after=gate).cancel()
        held = executor.submit(program.plan([1], [1]), after=gate)
        value = registry.get_sample_value
        assert value("kvplan_transfers_total", FLOW_LABELS) == 3
        assert value("kvplan_bytes_total", FLOW_LABELS) == 3 * 256
        assert value("kvplan_descriptors_total", FLOW_LABELS) == 3
        assert value("kvplan_launches_total", FLOW_LABELS) == 3
        assert value("kvplan_transfer_seconds_count", FLOW_LABELS) == 3
        assert value("kvplan_transfer_seconds_sum", FLOW_LABELS) == executor.stats().seconds
        assert value("kvplan_transfer_seconds_bucket", FLOW_LABELS | {"le": "10.0"}) == 3
        assert value("kvplan_errors_total", {"executor": "a"}) == 1
        assert value("kvplan_cancelled_total", {"executor": "a"}) == 1
        assert value("kvplan_in_flight", {"executor": "a"}) == 1
        assert value("kvplan_predictions_total", {"executor": "a"}) == 0
        assert value("kvplan_prediction_error_ratio", {"executor": "a"}) is None
        held.cancel()
        gate.set()


def test_a_source_that_fails_or_has_nothing_yet_leaves_the_others_theirs(registry, caplog):
    latest = {}
    registry.register(collector({"early": lambda: latest.get(0), "broken": lambda: latest[1], 2: ExecutorStats}))
    generate = pytest.importorskip("prometheus_client").generate_latest
    lines = [line for line in generate(registry).decode().splitlines() if line.startswith("kvplan_in_flight")]
    assert lines == ['kvplan_in_flight{executor="2"} 0.0']
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("kvplan.metrics", "WARNING")
    assert record.getMessage() == "no metrics of executor 'broken'"
    assert isinstance(record.exc_info[1], KeyError)


def test_a_collector_keeps_no_executor_alive(registry):
    executor = kvplan.Executor()
    registry.register(collector({"a": executor.stats}))
    gone = weakref.ref(executor)
    executor.close()
    del executor
    gc.collect()
    assert gone() is None
    assert registry.get_sample_value("kvplan_in_flight", {"executor": "a"}) is None


def test_without_the_client_there_are_no_metrics(monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(KVPlanError, match=r"pip install prometheus-client"):
        collector({})


# Logs.


def test_failures_are_warned_of_at_most_so_often(caplog, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(tally, "time", SimpleNamespace(monotonic=lambda: now[0]))
    _, _, program = pair()
    with kvplan.Executor() as executor:
        for _ in range(5):
            with pytest.raises(TransferError):
                executor.submit(program.plan([1, 2], [1, 2]), after=Broken()).synchronize()
        now[0] += tally.QUIET_SECONDS
        with pytest.raises(TransferError):
            executor.submit(program.plan([1], [1]), after=Broken()).synchronize()
        executor.submit(program.plan([1], [1])).synchronize()
    first, last = (record for record in caplog.records if record.levelno >= logging.WARNING)
    assert first.name == last.name == "kvplan.execute"
    assert first.getMessage().startswith("Plan(host of 2 units, 512 bytes) by path host failed: the stream is gone")
    assert "more" not in first.getMessage()
    assert last.getMessage().endswith("(4 more since the last warning)")
    assert (first.kvplan_path, first.kvplan_direction, first.kvplan_nbytes, first.kvplan_units) == (
        "host", "host", 512, 2,
    )  # fmt: skip
    assert (first.kvplan_unsaid, last.kvplan_unsaid) == (0, 4)
    assert executor.stats().failed == 6
