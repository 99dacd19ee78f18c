"""What is prepared: the first transfers compile nothing and upload nothing; and preparing moves nothing."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

import kvplan
from kvplan.base import process as forks
from kvplan.engines.startup import prepare
from tests.commands import ROOT
from tests.patience import PATIENCE
from tests.simulated import Device
from tests.simulated.executors import executor_on, pair_on

LAYOUT = kvplan.KVLayout.from_tensors("layer block token dim", np.zeros((2, 8, 4, 16), np.int8))
PLAN = kvplan.compile(LAYOUT, LAYOUT).plan([0], [1])


def test_an_engine_starts_whatever_is_refused(caplog):
    device = Device()
    refused, taken = (pair_on(device, "load", pin=pin).program for pin in (False, True))
    with executor_on(device, "staged") as executor:
        prepare(executor, [refused, taken])
    assert "or the first one will wait: HostMemoryError: path 'staged' reaches" in caplog.text


def fork_beside(compiling: Callable[[], object]) -> threading.Thread:
    """Fork while a thread compiles, which must leave the child a lock that it gets; returns the thread."""
    held = threading.Event()

    def compiles():
        with forks.compiling():
            held.set()
            compiling()

    thread = threading.Thread(target=compiles)
    thread.start()
    assert held.wait(PATIENCE)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Python 3.12, of a fork beside threads
        child = os.fork()
    if not child:
        os._exit(0 if forks._Process.lock.acquire(timeout=PATIENCE) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    return thread


class Asked:
    """The lock of what compiles, which says when somebody asks for it who has to wait."""

    def __init__(self) -> None:
        self.lock, self.waits = threading.RLock(), threading.Event()
        self.release, self._is_owned = self.lock.release, self.lock._is_owned

    def acquire(self, blocking=True, timeout=-1):
        if self.lock.acquire(blocking=False):
            return True
        self.waits.set()
        return self.lock.acquire(blocking, timeout)

    def __enter__(self):
        self.acquire()

    def __exit__(self, *error):
        self.release()


def test_a_fork_waits_for_what_is_being_compiled(monkeypatch):
    lock = Asked()
    monkeypatch.setattr(forks._Process, "lock", lock)
    monkeypatch.setattr(forks, "COMPILE_SECONDS", PATIENCE)
    waited = []
    fork_beside(lambda: waited.append(lock.waits.wait(PATIENCE))).join()
    assert waited == [True]
    assert lock.acquire(timeout=PATIENCE)  # given back in the parent, too
    lock.release()


def test_a_fork_that_has_waited_long_enough_gives_the_child_a_lock(monkeypatch):
    monkeypatch.setattr(forks, "COMPILE_SECONDS", 0.05)
    go_on = threading.Event()
    thread = fork_beside(partial(go_on.wait, PATIENCE))
    assert not forks._Process.lock.acquire(blocking=False)  # who compiles here has it still
    go_on.set()
    thread.join()


@pytest.mark.slow
def test_loops_that_were_loaded_are_compiled_for_all_that_comes():
    command = [sys.executable, "-m", "tests.execute.loaded_loops"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "compiled: nothing\n"
