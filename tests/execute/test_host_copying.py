"""How the host path copies: with which threads, which end with it, and from which size on past the CPU's caches."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import kvplan
from kvplan import KVLayout

MIB = 1 << 20


def program_of(shape: tuple[int, ...]) -> kvplan.CopyProgram:
    sides = (KVLayout.from_tensors("block dim", np.zeros(shape, np.uint8)) for _ in range(2))
    return kvplan.compile(*sides)


@pytest.mark.parametrize("priority", ["normal", "high"])
def test_no_thread_outlives_a_close(priority):
    before = set(threading.enumerate())
    with kvplan.Executor(policy=kvplan.Policy(threads=3)) as executor:
        executor.submit(program_of((32, MIB)).plan(range(32), range(32)), priority=priority).synchronize()
        more = set(threading.enumerate()) - before
        assert len(more) >= 3  # those that copy: two beside the one that takes transfers
    assert not set(threading.enumerate()) - before


def test_no_thread_runs_before_a_submit():
    before = set(threading.enumerate())
    with kvplan.Executor() as executor:
        executor.prepare()
        assert set(threading.enumerate()) == before
        executor.submit(program_of((1, 8)).plan([0], [0])).synchronize()
        assert [one.name for one in set(threading.enumerate()) - before] == ["kvplan-host"]


@pytest.mark.parametrize("end", ["finish", "cancel"])
def test_an_end_calls_each_function_once(end):
    gate, calls = threading.Event(), []
    with kvplan.Executor() as executor:
        transfer = executor.submit(program_of((1, 8)).plan([0], [0]), after=gate)
        assert transfer.add_done_callback(lambda: calls.append("before"))
        assert not calls
        gate.set() if end == "finish" else transfer.cancel()
    assert calls == ["before"]
    assert transfer.add_done_callback(lambda: calls.append("after"))
    assert calls == ["before", "after"]
    gate.set()
