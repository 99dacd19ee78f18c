"""Threads that copy for the host path: they end with it."""

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
        # How many copied depends on the machine's load: a pool starts a thread only when none of its own is idle.
        assert set(threading.enumerate()) - before
    assert not set(threading.enumerate()) - before
