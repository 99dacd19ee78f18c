"""The check of the driver's batch call, on a driver that is none: it finds what is lost, and nothing else."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from benchmarks.gpu.driver import batch_bytes
from benchmarks.gpu.driver.batch_bytes import Case, drawn, equal, run


class Copying:
    """Two buffers on each side in host memory; a batch loses what it is told to."""

    lost: dict[int, slice] = {}  # noqa: RUF012

    def __init__(self, nbytes):
        self.host, self.here, self._gpu, self._there = (np.empty(nbytes, np.uint8) for _ in range(4))
        self.gpu, self.there = self._gpu.ctypes.data, self._there.ctypes.data

    def wait(self):
        pass

    def copy(self, dst, src, nbytes):
        ctypes.memmove(dst, src, nbytes)

    def batch(self, columns, case):
        for k, (dst, src, nbytes) in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
            at = range(nbytes)[self.lost.get(k, slice(0, 0))]
            kept = ctypes.string_at(dst + at.start, len(at)) if at else b""
            ctypes.memmove(dst, src, nbytes)
            ctypes.memmove(dst + at.start, kept, len(at))


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(batch_bytes, "Driver", Copying)
    monkeypatch.setattr(batch_bytes, "NBYTES", 1 << 16)


@pytest.mark.parametrize("way", ["load", "store", "within"])
def test_what_arrives_is_right(way):
    assert run(Case(drawn(1, 600), way=way), 3) == {
        "transfers": 3, "wrong": 0, "descriptors": 218, "most_wrong": 0, "bytes": 0, "first": []
    }  # fmt: skip


@pytest.mark.parametrize("way", ["load", "store", "within"])
def test_what_is_lost_is_named(way, monkeypatch):
    monkeypatch.setattr(Copying, "lost", {3: slice(0, None), 20: slice(100, 101), 31: slice(1020, 1024)})
    found = run(Case(equal(1024, 144), way=way), 2)
    assert found == {"transfers": 2, "wrong": 2, "descriptors": 64, "most_wrong": 3, "bytes": 2 * (1024 + 1 + 4),
                     "first": [3, 20, 31]}  # fmt: skip


def test_a_call_each_loses_nothing_of_a_batch(monkeypatch):
    monkeypatch.setattr(Copying, "lost", {3: slice(0, None)})
    assert run(Case(equal(1024), most=0), 2)["wrong"] == 0
