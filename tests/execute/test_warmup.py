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
from hypothesis import given
from hypothesis import strategies as st

import kvplan
from kvplan.base import process as forks
from kvplan.engines.startup import prepare
from kvplan.execute.gpu.resources import DEFAULT_LIMITS, Limits
from kvplan.plan import jit, loops
from tests.commands import ROOT
from tests.patience import PATIENCE
from tests.profiles import examples
from tests.simulated import Device
from tests.simulated.executors import MOVE, PATHS, Drawn, executor_on, favouring, pair_on, paths_in_turn
from tests.simulated.hybrid import Hybrid
from tests.strategies import cases

LAYOUT = kvplan.KVLayout.from_tensors("layer block token dim", np.zeros((2, 8, 4, 16), np.int8))
PLAN = kvplan.compile(LAYOUT, LAYOUT).plan([0], [1])
WAYS = [(path, direction) for path in PATHS for direction in ("load", "store", "device")
        if (path, direction) != ("staged", "device")]  # fmt: skip


def made(executor: kvplan.Executor) -> tuple[set[object], int]:
    """Kernels that were compiled, and how many run tables were uploaded."""
    tables = executor._backend.resources.tables
    return set(tables._functions), sum(len(known) for known in tables._known.values())


@pytest.mark.parametrize(("path", "direction"), WAYS)
@examples(25)
@given(case=cases(), seed=st.integers(0, 2**32), named=st.booleans())
def test_a_transfer_finds_all_that_it_needs(path, direction, case, seed, named):
    device = Device(seed)
    drawn = Drawn(case, device, direction)
    one = drawn.program.plan([0], [0])
    roots = drawn.src.roots + drawn.dst.roots
    before = [root.copy() for root in roots]
    profile = None if named else favouring(path)
    with executor_on(device, path if named else "auto", profile) as executor:
        executor.prepare(one)
        device.run()
        for root, was in zip(roots, before, strict=True):
            np.testing.assert_array_equal(root, was)
        assert executor.stats().transfers == 0
        ready = made(executor)
        executor.submit(drawn.plan).synchronize()
        drawn.check()
        if len(one.parts) <= DEFAULT_LIMITS.launch_groups:  # beyond, kernels are made by the descriptors of a plan
            assert made(executor) == ready


def test_auto_is_ready_for_every_path_that_it_may_take():
    device = Device()
    pair = pair_on(device, "store")
    with executor_on(device) as executor:
        executor.prepare(pair.program.plan([0], [0]))
        assert {key[0] for known in executor._backend.resources.tables._known.values() for key in known} == {
            "direct", ("ring", False)
        }  # fmt: skip


def test_a_named_path_is_all_that_is_made_ready():
    device = Device()
    pair = pair_on(device, "load")
    with executor_on(device, "copy_engine") as executor:
        executor.prepare(pair.program.plan([0], [0]))
        assert made(executor) == (set(), 0)
    with executor_on(device, "kernel") as executor:
        executor.prepare(pair.program.plan([0], [0]))
        assert {key[0] for known in executor._backend.resources.tables._known.values() for key in known} == {"direct"}


def test_tables_are_there_before_anything_can_take_their_memory():
    """The program is dropped at once: what its run table had is given to others, and no upload may be on its way."""
    device = Device(eager=False)
    pair = pair_on(device, "load")
    with executor_on(device, "kernel") as executor:
        executor.prepare(pair.program.plan([0], [0]))
        assert not any(device.streams.values())
        assert not any(
            table.fresh for known in executor._backend.resources.tables._known.values() for table in known.values()
        )


def test_what_a_submit_would_refuse_is_refused_now():
    device = Device()
    pageable = pair_on(device, "load", pin=False).program.plan([0], [0])
    with executor_on(device, "kernel") as executor:
        with pytest.raises(kvplan.HostMemoryError, match="path 'kernel' reaches pinned memory only"):
            executor.prepare(pageable)
        with pytest.raises(kvplan.PathError, match="'host' plan"):
            executor.prepare(PLAN)
        with pytest.raises(kvplan.HostMemoryError):
            executor.prepare(pair_on(device, "load", pin=False).program.plan([], []))
        with pytest.raises(kvplan.KVPlanError, match="plan is a int; prepare takes what"):
            executor.prepare(3)
    with pytest.raises(kvplan.TransferError, match="the executor is closed"):
        executor.prepare(PLAN)
    with kvplan.Executor() as executor, pytest.raises(kvplan.PathError, match="path 'host'"):
        executor.prepare(pageable)
    with pytest.raises(kvplan.TransferError, match="the executor is closed"):
        executor.prepare()


def test_pageable_memory_and_empty_plans_need_nothing():
    device = Device()
    with executor_on(device) as executor:
        executor.prepare()
        executor.prepare(pair_on(device, "load", pin=False).program.plan([0], [0]))
        executor.prepare(pair_on(device, "load").program.plan([], []))
        assert made(executor) == (set(), 0)


def test_an_engine_starts_whatever_is_refused(caplog):
    device = Device()
    refused, taken = (pair_on(device, "load", pin=pin).program for pin in (False, True))
    with executor_on(device, "staged") as executor:
        prepare(executor, [refused, taken])
        assert made(executor)[1] == 1  # of the one behind
    assert "or the first one will wait: HostMemoryError: path 'staged' reaches" in caplog.text


def test_an_engine_starts_without_a_compiler(caplog):
    device = Device()
    pair = pair_on(device, "load")

    def function(shape):
        raise RuntimeError("no C compiler")

    with executor_on(device, profile=favouring("copy_engine")) as executor:
        executor._backend.resources.tables.function = function
        prepare(executor, [pair.program])
        assert "RuntimeError: no C compiler" in caplog.text
        executor.submit(pair.plan(MOVE)).synchronize()
        pair.check()


@pytest.mark.parametrize("path", ["kernel", "staged"])
def test_closing_waits_for_what_is_being_made(path):
    device = Device()
    program = pair_on(device, "load").program
    compiling, go_on, closed = (threading.Event() for _ in range(3))
    with executor_on(device, path) as executor:
        tables = executor._backend.resources.tables
        whole = tables.function

        def function(shape):
            compiling.set()
            assert go_on.wait(PATIENCE)
            return whole(shape)

        tables.function = function
        preparing = threading.Thread(target=executor.prepare, args=(program.plan([0], [0]),))
        closing = threading.Thread(target=lambda: (executor.close(), closed.set()))
        preparing.start()
        assert compiling.wait(PATIENCE)
        closing.start()
        assert not closed.wait(0.1)
        go_on.set()
        for thread in (preparing, closing):
            thread.join(PATIENCE)
        assert closed.is_set()


@pytest.mark.parametrize("path", ["kernel", "staged"])
def test_layers_have_tables_of_their_own(path):
    device = Device()
    pair = pair_on(device, "load")
    with executor_on(device, path, limits=Limits(layer_group_nbytes=1)) as executor:
        executor.prepare(pair.program.plan([0], [0]), by_layer=True)
        ready = made(executor)
        executor.submit(pair.plan(MOVE), by_layer=True).synchronize()
        pair.check()
        assert made(executor) == ready
        executor.submit(pair.plan(MOVE)).synchronize()
        assert made(executor) != ready  # of the whole, for which nobody asked


def test_both_halves_of_a_plan_are_made_ready():
    device = Device()
    hybrid = Hybrid(device, "load")
    with executor_on(device) as executor:
        executor.prepare(hybrid.plan([0], [0]))
        ready = made(executor)
        with paths_in_turn(["copy_engine+kernel"]):
            executor.submit(hybrid.plan([0, 3, 5], [4, 1, 2])).synchronize()
        assert made(executor) == ready


def test_the_kernel_of_many_groups_is_that_of_the_plan():
    device = Device()
    pairs = [pair_on(device, "load") for _ in range(DEFAULT_LIMITS.launch_groups + 1)]
    joined = kvplan.join([pair.plan(MOVE) for pair in pairs])
    with executor_on(device, "kernel") as executor:
        executor.prepare(joined)
        ready = made(executor)
        for plan in (joined, *(pair.program.plan([0], [0]) for pair in pairs)):
            executor.submit(plan).synchronize()
        assert made(executor) == ready


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


def test_a_fork_whose_wait_is_interrupted_leaves_no_lock(monkeypatch):
    class Interrupted(Asked):
        def acquire(self, blocking=True, timeout=-1):
            super().acquire(blocking, timeout)
            raise KeyboardInterrupt

    lock = Interrupted()
    monkeypatch.setattr(forks._Process, "lock", lock)
    with pytest.raises(KeyboardInterrupt):
        forks._wait()  # Python prints it, and forks
    assert lock._is_owned()
    forks._go_on()
    assert not lock._is_owned()


def test_a_fork_waits_for_a_first_plan_which_loads_and_compiles_loops(monkeypatch):
    within = []

    class Counted(Asked):
        def __enter__(self):
            within.append(self)
            super().__enter__()

    monkeypatch.setattr(forks._Process, "lock", Counted())
    monkeypatch.setattr(loops, "loaded", None)
    for _ in range(2):
        loops.loops_for(1)
        assert len(within) == 1  # later plans ask for no lock
    add = jit.compiled(lambda one: one + 1)
    for _ in range(2):
        assert add(1) == 2
        assert len(within) == 2


def test_a_close_of_the_cpu_s_executor_within_what_is_compiled_waits_for_nobody():
    closed = threading.Event()

    def closes():
        with forks.compiling():
            executor = kvplan.Executor()  # whose runner waits for the lock
            executor.submit(PLAN)
            executor.close()
        executor.close()
        closed.set()

    threading.Thread(target=closes, daemon=True).start()
    assert closed.wait(PATIENCE)


def test_a_fork_that_has_waited_long_enough_gives_the_child_a_lock(monkeypatch):
    monkeypatch.setattr(forks, "COMPILE_SECONDS", 0.05)
    go_on = threading.Event()
    thread = fork_beside(partial(go_on.wait, PATIENCE))
    assert not forks._Process.lock.acquire(blocking=False)  # who compiles here has it still
    go_on.set()
    thread.join()


def test_a_close_within_what_is_being_made_waits_for_nobody():
    """As the handler of a signal does, which comes while an engine starts."""
    device = Device()
    program = pair_on(device, "load").program
    with executor_on(device, "kernel") as executor:
        tables = executor._backend.resources.tables
        whole = tables.function

        def function(shape):
            executor.close()
            return whole(shape)

        tables.function = function
        executor.prepare(program.plan([0], [0]))
        with pytest.raises(kvplan.TransferError, match="closed"):
            executor.prepare(program.plan([0], [0]))


@pytest.mark.slow
def test_loops_that_were_loaded_are_compiled_for_all_that_comes():
    command = [sys.executable, "-m", "tests.execute.loaded_loops"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "compiled: nothing\n"
