"""Ctrl-C at any point of a call: the process goes on with other transfers, or closes; no lock is left held."""

from __future__ import annotations

import gc
import itertools
import threading
from contextlib import suppress

import numpy as np
import pytest

import kvplan
from kvplan import KVLayout, TransferError
from tests.interrupts import Interrupt
from tests.patience import until

# What is raised in a finalizer, Python swallows.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")]
SECONDS = 60.0


def closes(executor):
    """Close in another thread, and fail if that hangs."""
    closing = threading.Thread(target=executor.close, daemon=True)
    closing.start()
    closing.join(SECONDS)
    assert not closing.is_alive(), "the close hangs"


def on_cpu(call, at):
    """Interrupt a call at a point; what is submitted afterwards arrives. Return whether it was interrupted."""
    src = np.random.default_rng(0).integers(1, 256, (16, 64), np.uint8)
    dst, gate = np.zeros_like(src), threading.Event()
    program = kvplan.compile(*(KVLayout.from_tensors("block dim", each) for each in (src, dst)))
    executor = kvplan.Executor(policy=kvplan.Policy(threads=2))
    interrupt = Interrupt(at)
    try:
        with suppress(TransferError):  # instead of KeyboardInterrupt, where it came into the start of a thread
            interrupt.within(call(executor, lambda block: program.plan([block], [block]), gate))
        gate.set()
        for priority in ("high", "normal"):
            executor.submit(program.plan([1, 2], [1, 2]), priority=priority).synchronize(SECONDS)
        assert (dst[1:3] == src[1:3]).all()
        closes(executor)
    except BaseException as error:
        raise AssertionError(f"interrupted at point {at}, {interrupt.where}") from error
    return bool(interrupt.where)


def submits(executor, plan, gate):
    return lambda: executor.submit(plan(3)).result()


def submits_high(executor, plan, gate):
    return lambda: executor.submit(plan(3), priority="high")


def cancels(executor, plan, gate):
    transfer = executor.submit(plan(3), after=gate)
    executor.submit(plan(4))
    return transfer.cancel


def waits(executor, plan, gate):
    transfer = executor.submit(plan(3), after=gate)

    def call():
        with suppress(TransferError):
            transfer.synchronize(0.001)

    return call


def asks(executor, plan, gate):
    transfer = executor.submit(plan(3))
    return lambda: (transfer.done(), executor.stats())


@pytest.mark.parametrize("call", [submits, submits_high, cancels, waits, asks])
def test_an_executor_of_the_cpu_goes_on(call):
    for at in itertools.count(1):
        if not on_cpu(call, at):
            break
    assert at > 5


def test_a_close_can_be_repeated():
    for at in itertools.count(1):
        src = np.arange(1, 129, dtype=np.uint8).reshape(2, 64)
        dst = np.zeros_like(src)
        program = kvplan.compile(*(KVLayout.from_tensors("block dim", each) for each in (src, dst)))
        executor = kvplan.Executor(policy=kvplan.Policy(threads=1))
        executor.submit(program.plan([0, 1], [0, 1]))
        came = Interrupt(at).within(executor.close)
        closes(executor)
        assert (dst == src).all()
        if not came:
            break


def test_an_executor_whose_making_was_interrupted_leaves_no_thread():
    before = set(threading.enumerate())
    for at in itertools.count(1):
        interrupt, made = Interrupt(at), list[kvplan.Executor]()
        with suppress(TransferError):
            interrupt.within(lambda made=made: made.append(kvplan.Executor()))
        made.clear()
        gc.collect()
        until(lambda: not [each for each in set(threading.enumerate()) - before if each.is_alive()])
        if not interrupt.where:
            break
    assert at > 20


def test_others_that_wait_for_the_same_transfer_are_woken():
    for at in itertools.count(1):
        src = np.arange(1, 129, dtype=np.uint8).reshape(2, 64)
        program = kvplan.compile(*(KVLayout.from_tensors("block dim", each) for each in (src, np.zeros_like(src))))
        gate, seen = threading.Event(), []
        with kvplan.Executor(policy=kvplan.Policy(threads=1)) as executor:
            transfer = executor.submit(program.plan([0], [0]), after=gate)
            other = threading.Thread(
                target=lambda transfer=transfer, seen=seen: (transfer.synchronize(SECONDS), seen.append(True))
            )
            other.start()
            opener = threading.Timer(0.002, gate.set)
            opener.start()
            came = Interrupt(at).within(transfer.synchronize)
            other.join(SECONDS)
            opener.join()
            assert seen == [True]
        if not came:
            break
