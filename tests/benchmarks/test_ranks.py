"""The benchmark of ranks, its processes on CPU memory: it moves through one shared pool, and sees what is wrong."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("torch", reason="the benchmark's tensors are torch's")

from benchmarks.gpu import ranks
from benchmarks.gpu.ranks import SMOKE, Measured, Part, Worker

pytestmark = [pytest.mark.slow, pytest.mark.slow]


def test_two_processes_store_and_load_in_three_topologies(capsys):
    name = f"kvplan-test-ranks-{os.getpid()}"
    assert ranks.main(["--smoke", "--device", "cpu", "--pool", name]) == 0
    printed = capsys.readouterr().out
    steps = [
        "store, TP 2, rank 0",
        "store, TP 2, rank 1",
        "load, TP 1, rank 0",
        "load, PP 2, rank 0",
        "load, PP 2, rank 1",
    ]
    assert [line.partition("  ")[0] for line in printed.splitlines()[1:]] == steps
    assert not Path("/dev/shm", name).exists()


def test_a_wrong_byte_is_seen():
    worker = Worker(1, SMOKE, "unused", "cpu")
    part = Part(range(2), range(1, 3))
    tensors = worker.cache(part, filled=True)
    worker.compare(part, tensors)
    tensors[1][0, 3, 1, 2, 5] += 1
    with pytest.raises(AssertionError, match="rank 1, layer 1: 1 elements are wrong"):
        worker.compare(part, tensors)
    worker.executor.close()


def test_a_process_that_fails_is_told_of():
    with pytest.raises(RuntimeError, match=r"rank [01]: LayoutError: shared is 'a name'"):
        ranks.measure(SMOKE, "a name", "cpu")


def test_a_rate_below_nine_tenths_is_missed():
    both = [{"store, TP 2": Measured(60.0, 50.0, 49.0, beside, {"path": "kernel"})} for beside in (44.9, 45.1)]
    rows = ranks.rows_of(both)
    assert [(row.what, row.ok) for row in rows] == [("store, TP 2, rank 0", False), ("store, TP 2, rank 1", True)]


def test_blocks_that_fit(tmp_path, monkeypatch):
    free = 120 * SMOKE.block_nbytes
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=free))
    assert ranks.fitting(ranks.Scale(layers=4, heads=4, dim=8, tokens=4), tmp_path).blocks == 30
    assert ranks.fitting(SMOKE, tmp_path).blocks == 16
    with pytest.raises(RuntimeError, match="has room for 0 blocks"):
        ranks.fitting(ranks.Scale(), tmp_path)
