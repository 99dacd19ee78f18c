"""Ctrl-C in the main thread, at random points of a call: the executor goes on or closes, no lock is left held.

And a signal handler that submits or closes within a submit.
"""

from __future__ import annotations

import itertools
import random
import threading
import time
from contextlib import suppress
from functools import partial

import numpy as np
import pytest

import kvplan
from kvplan import KVLayout, TransferError
from tests.interrupts import Interrupt

# What is raised in a finalizer, Python swallows.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
SECONDS = 60.0
POINTS = 12  # of each call


def closes(executor):
    """Close in another thread, and fail if that hangs."""
    closing = threading.Thread(target=executor.close, daemon=True)
    closing.start()
    closing.join(SECONDS)
    assert not closing.is_alive(), "the close hangs"


def caches():
    src = np.random.default_rng(0).integers(1, 256, (16, 64), np.uint8)
    dst = np.zeros_like(src)
    return src, dst, kvplan.compile(*(KVLayout.from_tensors("block dim", each) for each in (src, dst)))


def interrupted(call, at):
    """Interrupt a call at a point; what is submitted afterwards arrives. Return the number of points."""
    (src, dst, program), gate = caches(), threading.Event()
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
    return interrupt.points


def submits(executor, plan, gate):
    return lambda: executor.submit(plan(3)).result()


def submits_high(executor, plan, gate):
    return lambda: executor.submit(plan(3), priority="high")


def cancels(executor, plan, gate):
    transfer = executor.submit(plan(3), after=gate, priority="high")
    executor.submit(plan(4))
    return transfer.cancel


def waits(executor, plan, gate):
    transfer = executor.submit(plan(3), after=gate)
    threading.Thread(target=transfer.synchronize, args=(SECONDS,)).start()

    def call():
        with suppress(TransferError):
            transfer.synchronize(0.001)

    return call


def asks(executor, plan, gate):
    transfer = executor.submit(plan(3))
    return lambda: (transfer.done(), executor.stats())


@pytest.mark.parametrize("call", [submits, submits_high, cancels, waits, asks])
def test_an_executor_of_the_cpu_goes_on(call):
    drawn, points = random.Random(call.__name__), interrupted(call, 0)
    for at in drawn.sample(range(1, points + 1), min(POINTS, points)):
        interrupted(call, at)


def test_a_close_can_be_repeated():
    for at in random.Random(1).sample(range(1, 60), POINTS):
        (src, dst, program), executor = caches(), kvplan.Executor()
        transfer = executor.submit(program.plan([0, 1], [0, 1]), after=Event(0.01))
        Interrupt(at).within(executor.close)
        closes(executor)
        assert transfer.done()
        assert (dst[:2] == src[:2]).all()


class Event:
    """An event that happens by itself."""

    def __init__(self, seconds):
        self.wait = partial(time.sleep, seconds)


@pytest.mark.parametrize("what", ["submits", "closes"])
def test_a_handler_that_interrupts_a_submit(what):
    refused, points = [], 0
    for at in itertools.count():
        (src, dst, program), made, executor = caches(), [], kvplan.Executor()

        def submit(block, executor=executor, program=program, made=made):
            try:
                made.append(executor.submit(program.plan([block], [block])))
            except TransferError as error:
                refused.append(str(error))

        interrupt = Interrupt(at, partial(submit, 5) if what == "submits" else executor.close)
        interrupt.within(partial(submit, 3))
        for transfer in made:
            transfer.synchronize(SECONDS)
        closes(executor)
        assert what == "closes" or (dst[3] == src[3]).all()
        points = points or interrupt.points
        if at > points:
            break
    expected = "came within another call of the same executor" if what == "submits" else "is closed"
    assert refused
    assert all(expected in text for text in refused)
