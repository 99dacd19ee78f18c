"""Baselines of a GPU, acted by the CPU: the same calls over the same descriptors move every byte."""

from __future__ import annotations

import sys
from contextlib import nullcontext

import pytest

from kvplan.errors import PathError, TransferError
from kvplan.measure import baselines, flights
from kvplan.measure.workload import DIRECTIONS, HOSTS, Buffers, Geometry, work

torch = pytest.importorskip("torch")
Line = pytest.importorskip("tests.measure.cpu_line").Line


@pytest.fixture
def at_once(monkeypatch):
    monkeypatch.setattr(baselines, "Enqueued", lambda line, nbytes, issue: flights.AtOnce(nbytes, issue))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("maker", [baselines.batch, baselines.loop, baselines.indexing])
def test_baselines_move_every_byte(maker, direction, host):
    buffers = Buffers(256 << 10, "cpu", 512 << 10)
    moved = work(buffers, Geometry(direction, host, 512, 240, 12))
    baseline = maker(Line(), moved)
    baseline.verify()
    assert baseline.begin().result().nbytes == moved.plan.nbytes


@pytest.mark.usefixtures("at_once")
def test_a_batch_is_cut(monkeypatch):
    monkeypatch.setattr(baselines, "MOST_DESCRIPTORS", 100)
    line, moved = Line(), work(Buffers(256 << 10, "cpu"), Geometry("load", "scattered", 512, 240, 240))
    baselines.batch(line, moved).verify()
    assert max(line.calls) <= 100
    assert sum(line.calls) == moved.plan.descriptors().size.size
    line.calls.clear()
    baselines.batch(line, moved, most=7).verify()
    assert max(line.calls) == 7
    assert sum(line.calls) == moved.plan.descriptors().size.size


def test_baselines_that_refuse(monkeypatch):
    moved = work(Buffers(256 << 10, "cpu"), Geometry("load", "scattered", 512, 240, 12))
    monkeypatch.setattr(baselines, "MOST_CALLS", 239)
    with pytest.raises(PathError, match="it makes a call for each run, and 240 runs are more than 239"):
        baselines.loop(Line(), moved)
    with pytest.raises(PathError, match="the driver has no cuMemcpyBatchAsync"):
        baselines.batch(Line(has_batch=False), moved)


def test_memcpy_moves_as_many_bytes():
    moved = work(Buffers(256 << 10, "cpu", 512 << 10), Geometry("store", "contiguous", 512, 240, 12))
    baseline = baselines.makers("cpu")[baselines.MEMCPY](moved)
    baseline.verify()
    assert baseline.begin().result().nbytes == moved.plan.nbytes == 240 * 512


def test_a_memcpy_that_fails_is_caught(monkeypatch):
    moved = work(Buffers(256 << 10, "cpu"), Geometry("store", "contiguous", 512, 240, 12))
    baseline = baselines.makers("cpu")[baselines.MEMCPY](moved)
    monkeypatch.setattr(baselines.np, "copyto", lambda dst, src: None)
    with pytest.raises(TransferError, match="numpy memcpy: not every byte"):
        baseline.verify()


def test_a_thread_of_its_own_gives_back_what_it_set():
    before = sys.getswitchinterval()
    with flights.Aside() as aside:
        assert sys.getswitchinterval() < before
        flight = aside.begin(lambda: flights.AtOnce(8, lambda: None))
        flight.synchronize()
        assert flight.done()
        assert flight.result().nbytes == 8
        failed = aside.begin(lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            failed.synchronize()
    assert sys.getswitchinterval() == before
