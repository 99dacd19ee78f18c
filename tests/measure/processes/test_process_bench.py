"""The bench of two processes, on the CPU: bytes come before times, and what is not measured is listed."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from kvplan.errors import KVPlanError
from kvplan.measure import baselines
from kvplan.measure.processes import process_bench
from kvplan.measure.processes.pool_owner import PoolOwner
from kvplan.measure.processes.process_bench import ProcessBench, ProcessRun
from kvplan.measure.processes.process_cases import ONE, TWO, Remote

torch = pytest.importorskip("torch")

TINY = {"sizes": (512, 2048), "most_nbytes": 1 << 20, "block_runs": 16, "layers": 3, "layer_nbytes": 1 << 16,
        "seconds": 600.0}  # fmt: skip
WAYS = (TWO, ONE, baselines.MEMCPY)


@pytest.fixture(autouse=True)
def few_notes(monkeypatch):
    monkeypatch.setattr(process_bench, "NOTES", 10)
    monkeypatch.setattr(process_bench, "WARM_NOTES", 2)


def test_all_of_two_processes_is_measured():
    shares = []
    run = ProcessRun(ProcessBench("cpu", "cpu", hosts=("contiguous", "scattered"), **TINY),
                     lambda share, what: shares.append(share))  # fmt: skip
    found = list(run.rows())
    asked = itertools.product(("push", "pull"), ("contiguous", "scattered"), TINY["sizes"], WAYS)
    assert Counter((one.direction, one.host, one.run_nbytes, one.path) for one in found) == Counter(asked)
    for one in found:
        assert one.verified
        assert one.broken == ""
        assert one.nbytes == 1 << 20
        assert one.gbps == pytest.approx(one.nbytes / one.seconds / 1e9)
        assert one.share == pytest.approx(one.gbps / run.ceilings.push)
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    told = run.findings.document()
    assert (told["transport"], told["block_nbytes"]) == ("shm", 16 * 2048)
    assert len(told["meet"]) == len(told["meet_layers"]) == 5
    assert told["seen"]["samples"] == told["submit"]["samples"] == 10
    assert told["submit"]["median"] > 0
    assert 0 < told["seen"]["median"] <= told["seen"]["tenth"] <= told["seen"]["hundredth"]


@pytest.mark.parametrize("direction", ["push", "pull"])
def test_bytes_that_do_not_arrive_are_told(monkeypatch, direction):
    """The other process's pool is not what it should be: a write of the comparison is lost."""
    lost = "read" if direction == "push" else "write"
    monkeypatch.setattr(Remote, lost, lambda remote: None)
    run = ProcessRun(ProcessBench("cpu", "cpu", directions=(direction,), **TINY))
    found = {one.path: one for one in run.rows() if one.run_nbytes == 512}
    assert "not every byte" in found[TWO].broken
    assert not found[TWO].verified
    assert found[ONE].broken == ""


@pytest.mark.parametrize(("told", "words"), [
    ({"device": "cuda:0", "peer": "cpu"}, "expected two GPUs, or the CPU twice"),
    ({"directions": ("load",)}, "unknown direction 'load'; expected one of push, pull"),
    ({"sizes": (100,)}, "runs of 100 bytes"), ({"block_runs": 3}, "131070 runs, 3 a block"),
    ({"hosts": ("woven",)}, "host 'woven'"),
    ({"sizes": (1 << 20,), "most_nbytes": 1 << 20}, "two blocks of 160 runs of 1 MiB do not fit into 1 MiB"),
])  # fmt: skip
def test_a_wrong_bench_is_refused(told, words):
    with pytest.raises(KVPlanError, match=words):
        ProcessBench(**told)


def test_notes_that_are_lost_are_told(monkeypatch):
    monkeypatch.setattr(PoolOwner, "arrivals", lambda owner: {})
    with pytest.raises(KVPlanError, match="of 12 notes, the other process has seen 0"):
        list(ProcessRun(ProcessBench("cpu", "cpu", **TINY)).rows())
