"""Ctrl-C in the main thread, at random points of a call: the executor goes on or closes, no lock is left held.

The transfer in whose submit it came may be lost. All others arrive.
"""

from __future__ import annotations

import random
import threading
from contextlib import suppress
from typing import Any

import pytest

import kvplan
from tests.contract.gpu.caches import MOVE, Ids, way
from tests.contract.gpu.machines import PATIENCE, Simulated
from tests.interrupts import Interrupt

# What is raised in a finalizer, Python swallows.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
PATHS = ("kernel", "staged", "copy_engine", "host")
POINTS = 6  # of each call, path and route

# Each is given an executor, a pair, a stream, and what the CPU waits for; it returns what is interrupted.
CALLS = {
    "at_once": lambda executor, pair, *_: lambda: executor.submit(pair.program.plan(*MOVE)),
    "behind_a_stream": lambda executor, pair, stream, _: (
        lambda: executor.submit(pair.program.plan(*MOVE), after=stream, priority="high")
    ),
    "behind_the_cpu": lambda executor, pair, _, happened: (
        lambda: executor.submit(pair.program.plan(*MOVE), after=happened)
    ),
    "and_its_result": lambda executor, pair, *_: (
        lambda: executor.submit(pair.program.plan(*MOVE), by_layer=True).result()
    ),
    "a_cancel": lambda executor, pair, _, happened: executor.submit(pair.program.plan(*MOVE), after=happened).cancel,
}


def a_wait(executor, pair, stream, _):
    transfer = executor.submit(pair.program.plan(*MOVE), by_layer=True)
    return lambda: (transfer.wait_layer(0, stream), transfer.wait(stream), transfer.done(), executor.stats())


CALLS["a_wait"] = a_wait


def in_time(call, why):
    """Call something in another thread, which would block at a lock that is held."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    assert not thread.is_alive(), why


def made(gpu, path):
    return gpu.executor(path, "cpu" if path == "host" else "cuda:0")


def interrupted(gpu, path, route, call, at):
    """Interrupt a call at a point, counted from 1; return how many points were passed."""
    executor, pair, stream, happened = made(gpu, path), way(gpu, route), gpu.stream(), threading.Event()
    if at % 2:
        pair.warm(executor)
    interrupt = Interrupt(at)
    try:
        with suppress(kvplan.TransferError):  # instead of KeyboardInterrupt, where it came into the start of a thread
            interrupt.within(CALLS[call](executor, pair, stream, happened))
        happened.set()
        in_time(lambda: executor.submit(pair.plan(Ids([6], [6]))).synchronize(PATIENCE), "a submit hangs")
        executor.submit(pair.plan(), priority="high").synchronize(PATIENCE)
        executor.submit(pair.plan()).synchronize(PATIENCE)
        in_time(executor.close, "close hangs")
        gpu.forgive()
        pair.check()
    except BaseException as error:
        raise AssertionError(f"interrupted at point {at}, {interrupt.where}") from error
    return interrupt.points


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("call", CALLS)
def test_the_executor_goes_on_after_an_interrupt(gpu, path, call):
    if path == "host" and call in ("behind_a_stream", "a_wait") and isinstance(gpu, Simulated):
        pytest.skip("a simulated stream does not wait on the CPU")
    drawn = random.Random(f"{path} {call}")
    for route in ("host",) if path == "host" else ("load", "store"):
        points = interrupted(gpu, path, route, call, 0)
        for at in drawn.sample(range(1, points + 1), min(POINTS, points)):
            interrupted(gpu, path, route, call, at)


@pytest.mark.parametrize("path", PATHS)
def test_a_close_that_is_interrupted_can_be_repeated(gpu, path):
    for at in random.Random(path).sample(range(1, 60), POINTS):
        executor, pair, happened = made(gpu, path), way(gpu, "host" if path == "host" else "load"), threading.Event()
        transfer = executor.submit(pair.plan(), after=happened)
        threading.Timer(0.01, happened.set).start()
        Interrupt(at).within(executor.close)
        in_time(executor.close, "close hangs")
        assert transfer.done()
        pair.check()


@pytest.mark.parametrize("path", PATHS)
def test_a_submit_of_a_signal_handler_within_a_submit_is_refused_or_arrives(gpu, path):
    points, refused, drawn = 0, 0, random.Random(path)
    for at in (0, *range(POINTS)):
        route, executor, flying = "host" if path == "host" else "load", made(gpu, path), list[Any]()
        pair, other = way(gpu, route), way(gpu, route, seed=5)
        pair.warm(executor)

        def handler(executor=executor, other=other, flying=flying) -> None:
            try:
                flying.append(executor.submit(other.program.plan([2], [3])))
                other.plan(Ids([2], [3]))
            except kvplan.TransferError as error:
                flying.append(error)

        interrupt = Interrupt(drawn.randrange(1, points) if at else 0, handler)
        interrupt.within(lambda executor=executor, pair=pair: executor.submit(pair.plan()).synchronize(PATIENCE))
        points = points or interrupt.points
        for each in flying:
            if isinstance(each, kvplan.TransferError):
                assert "this submit came within another call" in str(each)
                refused += 1
            else:
                each.synchronize(PATIENCE)
        in_time(executor.close, "close hangs")
        pair.check()
        other.check()


def test_an_interrupt_within_the_start_of_the_thread(gpu, monkeypatch, pair, happened):
    executor = gpu.executor("kernel")
    start, interrupted = threading.Thread.start, []

    def starts(thread: threading.Thread) -> None:
        start(thread)
        if not interrupted:
            interrupted.append(thread)
            raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", starts)
    with suppress(KeyboardInterrupt):
        executor.submit(pair.program.plan(*MOVE))
    flying = [executor.submit(pair.plan(Ids([k % 9], [k % 9])), after=happened) for k in range(40)]
    happened.set()
    for transfer in flying:
        transfer.synchronize(PATIENCE)
    pair.check()
