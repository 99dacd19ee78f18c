"""What an operator sees: metrics, logs, ranges."""

from __future__ import annotations

import gc
import logging
import pickle
import sys
import threading
import weakref
from contextlib import contextmanager
from itertools import pairwise
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvplan
from kvplan import KVPlanError, PathError, TransferError
from kvplan.execute import stats as tally
from kvplan.execute.stats import BUCKETS, ExecutorStats, FlowStats, Tally
from kvplan.execute.transfer import TransferResult
from tests.execute.host_processes import Broken, pair
from tests.patience import until

FLOW_LABELS = {"executor": "a", "path": "host", "direction": "host"}


# Stats.


@given(
    st.lists(
        st.tuples(
            st.integers(0, 1 << 40), st.floats(0, 20), st.sampled_from(["kernel", "staged"]),
            st.sampled_from(["load", "store"]),
        )
    )
)  # fmt: skip
def test_flows_and_paths_sum_to_the_whole(results):
    made = Tally()
    for nbytes, seconds, path, direction in results:
        made.add(TransferResult(nbytes, seconds, path, 3, 2), direction)
    stats = made.stats()
    for parts in (stats.flows.values(), stats.paths.values()):
        for name in ("transfers", "nbytes", "descriptors", "launches"):
            assert sum(getattr(part, name) for part in parts) == getattr(stats, name)
        assert sum(part.seconds for part in parts) == pytest.approx(stats.seconds)
    assert stats.transfers == len(results)
    assert {path for path, _ in stats.flows} == set(stats.paths)
    for (path, direction), flow in stats.flows.items():
        mine = [seconds for _, seconds, *its in results if its == [path, direction]]
        edges = [0.0, *BUCKETS, float("inf")]
        assert flow.within == tuple(
            sum(low < s <= high or (k == 0 and s == 0) for s in mine) for k, (low, high) in enumerate(pairwise(edges))
        )


def test_stats_go_to_another_process():
    made = Tally()
    made.add(TransferResult(5, 0.5, "kernel", 1, 1), "load")
    stats = pickle.loads(pickle.dumps(made.stats()))
    assert stats == made.stats()
    assert stats.flows == {("kernel", "load"): FlowStats(1, 5, 0.5, 1, 1, (0,) * 14 + (1,) + (0,) * 5)}


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


def test_stats_of_other_processes_are_scraped_here(registry):
    flow = FlowStats(4, 100, 2.0, 8, 4, (1, 0, 3))
    sent = ExecutorStats(4, 100, 2.0, 8, 4, predicted=4, prediction_error=0.25, flows={("kernel", "load"): flow})
    registry.register(collector({"rank 0": lambda: sent, "rank 1": lambda: ExecutorStats(failed=2)}))
    labels = {"executor": "rank 0", "path": "kernel", "direction": "load"}
    found = [
        registry.get_sample_value("kvplan_transfer_seconds_bucket", labels | {"le": le})
        for le in ("1e-05", "2.5e-05", "5e-05", "10.0", "+Inf")
    ]
    assert found == [1, 1, 4, 4, 4]
    assert registry.get_sample_value("kvplan_prediction_error_ratio", {"executor": "rank 0"}) == 0.25
    assert registry.get_sample_value("kvplan_errors_total", {"executor": "rank 1"}) == 2


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


def test_the_life_of_an_executor_is_information_and_submits_are_for_debugging(caplog):
    _, _, program = pair()
    with caplog.at_level(logging.DEBUG, "kvplan"), kvplan.Executor() as executor:
        executor.submit(program.plan([1], [1]), priority="high").synchronize()
    said = [(record.levelname, record.getMessage()) for record in caplog.records if record.name == "kvplan.execute"]
    assert said == [
        ("INFO", "executor of cpu, path auto"),
        ("DEBUG", "submit Plan(host of 1 units, 256 bytes), priority high"),
        ("INFO", "executor of cpu closed"),
    ]


# Ranges.


def test_without_being_asked_for_there_are_no_ranges(monkeypatch):
    monkeypatch.delenv("KVPLAN_NVTX", raising=False)
    monkeypatch.setitem(sys.modules, "nvtx", None)
    kvplan.Executor().close()
    monkeypatch.setenv("KVPLAN_NVTX", "1")
    before = set(threading.enumerate())
    with pytest.raises(PathError, match="KVPLAN_NVTX is set, and NVTX ranges need the package nvtx"):
        kvplan.Executor()
    until(lambda: set(threading.enumerate()) <= before)  # its threads have been told to end


def test_each_submit_is_a_range(monkeypatch):
    seen = []

    @contextmanager
    def annotate(message, color, domain):
        seen.append(f"{domain}: {message}")
        yield
        seen.append("end")

    monkeypatch.setenv("KVPLAN_NVTX", "1")
    monkeypatch.setitem(sys.modules, "nvtx", SimpleNamespace(annotate=annotate))
    _, _, program = pair()
    with kvplan.Executor() as executor:
        executor.submit(program.plan([1, 4], [1, 2])).synchronize()
        executor.submit(program.plan([1], [1]), priority="high").synchronize()
    assert seen == ["kvplan: host 2 units, 512 bytes", "end", "kvplan: host 1 units, 256 bytes", "end"]
