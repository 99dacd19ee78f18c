"""Blocking waits that hold no lock, so that Ctrl-C in one of them leaves no lock held.

``threading.Event`` and ``Condition`` are Python code. A KeyboardInterrupt that comes after they take their lock, but
before the following ``try``, leaves it locked for ever. Here each waiting thread has its own queue.
"""

from __future__ import annotations

import _thread
import time
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any

Wake = SimpleQueue[Any]  # only the number of entries counts


def wake_all(sleepers: list[Any]) -> None:
    """Wake all sleepers. Whoever is added later sees by itself what has happened."""
    for sleeper in tuple(sleepers):
        sleeper.put(None)


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


class _Nap:
    """An entry among the sleepers for a wait with a limit: the timed wait of a lock ends in time; see :func:`woken`."""

    def __init__(self) -> None:
        self._lock = _thread.allocate_lock()
        self._lock.acquire()

    def put(self, entry: object) -> None:
        """End the wait."""
        del entry
        with suppress(RuntimeError):  # it was ended before
            self._lock.release()

    def get(self, seconds: float) -> None:
        """Wait for an entry, at most so long."""
        self._lock.acquire(timeout=bounded(seconds))


def sleep(
    over: Callable[[], bool], sleepers: list[Any], timeout: float | None = None, wake: Wake | None = None
) -> bool:
    """Block until a condition holds; the thread that makes it true calls :func:`wake_all`.

    Args:
        over: a function that returns whether the condition holds; called again after every wake.
        sleepers: the queues of all waiting threads; the caller's queue is among them while it waits.
        timeout: longest wait in seconds; None for no limit.
        wake: the caller's own queue, if other threads may wake it for other reasons and there is no limit.

    Returns:
        Whether the condition held in time.
    """
    if over():
        return True
    if timeout is None:
        mine: Any = SimpleQueue() if wake is None else wake
    else:
        mine, end = _Nap(), time.monotonic() + timeout
    try:
        sleepers.append(mine)
        while not over():
            if timeout is None:
                mine.get()
                continue
            left = end - time.monotonic()
            if not left > 0:  # also for nan
                return over()
            mine.get(left)
        return True
    finally:
        if mine in sleepers:  # an interrupted append may not have come
            sleepers.remove(mine)


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
        self.sleepers: list[Any] = []

    def is_set(self) -> bool:
        """Return whether the event has happened."""
        return self.happened

    def set(self) -> None:
        """Set the event, and wake all waiting threads."""
        self.happened = True
        wake_all(self.sleepers)

    def wait(self, timeout: float | None = None, wake: Wake | None = None) -> bool:
        """Block until the event has happened, at most ``timeout`` seconds; return whether it has happened."""
        return sleep(self.is_set, self.sleepers, timeout, wake)
