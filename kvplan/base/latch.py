"""Blocking waits that hold no lock, so that a signal handler may interrupt them at any bytecode.

Python runs signal handlers in its main thread, after a call or when a loop jumps back to its start. If the handler
raises an exception, such as KeyboardInterrupt, it appears at that point. ``threading.Event`` and ``Condition`` are
Python code. An exception that comes after they take their lock, but before the following ``try``, leaves it locked for
ever. Here each waiting thread has its own queue, and one C call wakes them all. No signal handler and no other thread
interrupts that call.
"""

from __future__ import annotations

import _thread
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import repeat
from queue import Empty, SimpleQueue
from typing import Any

Wake = SimpleQueue[Any]  # only the number of entries counts

NO_THREAD = "can't start new thread", "can't create new thread"  # CPython's words, the second since 3.12
NAP = 1e-3  # seconds between two looks of a wait that has a limit, and no thread for its alarm

_put = SimpleQueue.put
_nothing = repeat(None)


def waking(sleepers: list[Wake]) -> Iterator[None]:
    """Return an iterator that wakes all sleepers when ``any()`` consumes it, also sleepers added before that."""
    return map(_put, sleepers, _nothing)


def woken(wake: Wake, seconds: float) -> bool:
    """Take an entry of a queue, and wait for one at most so long; return whether there was one.

    ``SimpleQueue.get(timeout=...)`` of CPython 3.11 waits without end if the time is over between two of its inner
    steps: it computes how much is left, and takes a negative number for no limit. A ``get`` that does not block leaves
    only one such step to do. This holds for a queue on which no other thread waits, and for threads that block signals
    (:class:`kvplan.base.threads.Worker`): a signal divides the wait into two steps. The C library's own signal to all
    threads, in ``setuid`` and ``setgid``, cannot be blocked.

    >>> wake = SimpleQueue()
    >>> wake.put(None), woken(wake, 1e-6), woken(wake, 1e-6)
    (None, True, False)
    """
    for block, timeout in ((False, None), (True, bounded(seconds))):
        with suppress(Empty):
            wake.get(block, timeout)
            return True
    return False


def bounded(seconds: float) -> float:
    """Return a time that a blocking call takes: at most 292 years, also for infinity.

    >>> bounded(2.5), bounded(float("inf")) == _thread.TIMEOUT_MAX
    (2.5, True)
    """
    return min(_thread.TIMEOUT_MAX, seconds)  # also for nan


def sleep(
    over: Callable[[], bool], sleepers: list[Wake], timeout: float | None = None, wake: Wake | None = None
) -> bool:
    """Block until a condition holds; the thread that makes it true calls :func:`waking`.

    With a timeout, a thread is started to wake the caller, which takes about 50 us: the caller may have to take signals
    (see :func:`woken`). A child that a signal handler forks meanwhile has no such thread.

    Args:
        over: a function that returns whether the condition holds; called again after every wake.
        sleepers: the queues of all waiting threads; the caller's queue is among them while it waits.
        timeout: longest wait in seconds; None for no limit.
        wake: the caller's own queue, if other threads may wake it for other reasons.

    Returns:
        Whether the condition held in time.
    """
    if over():
        return True
    mine: Wake = SimpleQueue() if wake is None else wake
    end = None if timeout is None else time.monotonic() + timeout
    alarm: _thread.LockType | None = None  # a thread wakes the caller at the end, unless this lock is released before
    try:
        sleepers.append(mine)
        while not over():
            if end is not None and alarm is None:
                if not time.monotonic() < end:  # also for nan
                    return False
                asleep = _thread.allocate_lock()
                asleep.acquire()
                alarm = asleep  # before the start, whose return may be interrupted
                if not thread_started(_ring, (alarm, end, mine)):
                    alarm = None
                    time.sleep(NAP)
                    continue
            mine.get()
            if end is not None and time.monotonic() >= end:
                return over()
        return True
    finally:  # an interrupted append may not have come
        try:
            if alarm is not None:
                alarm.release()
        finally:
            if mine in sleepers:
                sleepers.remove(mine)


def thread_started(call: Callable[..., object], given: tuple[object, ...]) -> bool:
    """Start a thread by one C call, unlike ``Thread.start``, so that an interrupt leaves no half-started one.

    Returns:
        False if there are no more threads, or if the interpreter ends, when threads do not run any more.
    """
    if sys.is_finalizing():
        return False
    try:
        _thread.start_new_thread(call, given)
    except RuntimeError as error:
        if not str(error).startswith(NO_THREAD):
            raise  # of a signal handler, which ran at the end of the call
        return False
    return True


def _ring(asleep: _thread.LockType, end: float, wake: Wake) -> None:
    while (left := end - time.monotonic()) > 0:
        if asleep.acquire(timeout=bounded(left)):
            return
    wake.put(None)


class Latch:
    """An event that happens once.

    Attributes:
        happened: whether the event has happened.
        sleepers: queues of the waiting threads.

    >>> latch = Latch()
    >>> latch.wait(0), latch.set(), latch.wait(), latch.is_set()
    (False, None, True, True)
    """

    __slots__ = ("happened", "sleepers")

    def __init__(self) -> None:
        self.happened = False
        self.sleepers: list[Wake] = []

    def is_set(self) -> bool:
        """Return whether the event has happened."""
        return self.happened

    def set(self) -> None:
        """Set the event, and wake all waiting threads."""
        wakes = waking(self.sleepers)
        self.happened = True  # from here to the end of any() no signal handler runs
        any(wakes)

    def wait(self, timeout: float | None = None, wake: Wake | None = None) -> bool:
        """Block until the event has happened, at most ``timeout`` seconds; return whether it has happened."""
        return sleep(self.is_set, self.sleepers, timeout, wake)
