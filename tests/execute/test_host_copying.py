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
        more = set(threading.enumerate()) - before
        assert len(more) >= 3  # those that copy: two beside the one that takes transfers
    assert not set(threading.enumerate()) - before
