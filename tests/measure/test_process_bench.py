"""The bench of two processes, on the CPU: bytes come before times, and what is not measured is listed."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from kvplan.measure import baselines, grid, processes
from kvplan.measure.bench import Run
from kvplan.measure.grid import ONE, Bench, usual
from kvplan.measure.processes import TWO, Remote

TINY = usual("cpu", "process") | {"sizes": (512, 2048), "counts": (64,), "most_nbytes": 1 << 20, "seconds": 600.0}
WAYS = (TWO, ONE, baselines.MEMCPY)


@pytest.fixture(autouse=True)
def few_notes(monkeypatch):
    monkeypatch.setattr(processes, "NOTES", 10)
    monkeypatch.setattr(processes, "WARM_NOTES", 2)
    monkeypatch.setattr(grid, "PEER_BLOCK_RUNS", 16)


def test_all_of_two_processes_is_measured():
    shares = []
    run = Run(Bench("cpu", **TINY | {"hosts": ("contiguous", "scattered")}), lambda share, what: shares.append(share))
    found = [one for one in run.rows() if "NIXL" not in one.path]
    asked = itertools.product(("push", "pull"), ("contiguous", "scattered"), TINY["sizes"], WAYS)
    assert Counter((one.direction, one.host, one.run_nbytes, one.path) for one in found) == Counter(asked)
    for one in found:
        assert one.verified
        assert one.broken == ""
        assert one.gbps == pytest.approx(one.nbytes / one.seconds / 1e9)
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    told = run.findings.document()
    assert (told["transport"], told["block_nbytes"]) == ("shm", 16 * 2048)
    assert len(told["meet"]) == 5
    assert told["seen"]["samples"] == told["submit"]["samples"] == 10
    assert told["submit"]["median"] > 0
    assert 0 < told["seen"]["median"] <= told["seen"]["tenth"] <= told["seen"]["hundredth"]


@pytest.mark.parametrize("direction", ["push", "pull"])
def test_bytes_that_do_not_arrive_are_told(monkeypatch, direction):
    """The other process's pool is not what it should be: a write of the comparison is lost."""
    lost = "read" if direction == "push" else "write"
    monkeypatch.setattr(Remote, lost, lambda remote: None)
    run = Run(Bench("cpu", **TINY | {"directions": (direction,)}))
    found = {one.path: one for one in run.rows() if one.run_nbytes == 512}
    assert "not every byte" in found[TWO].broken
    assert not found[TWO].verified
    assert found[ONE].broken == ""
