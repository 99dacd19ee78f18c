"""Waiting that a signal's handler may break off between any two bytecodes, and that finalizers may come into.

Python runs the handlers of signals in its main thread, after a call or at a jump back; what they raise, such as
KeyboardInterrupt, comes out there. ``threading.Event`` and ``Condition`` are Python code: broken off between taking
their lock and the ``try`` behind it, they hold it for ever. Here nothing holds a lock. Each sleeper has a queue of its
own, and whoever wakes them does so by one call of C, which neither a signal nor another thread comes into.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import repeat
from queue import Empty, SimpleQueue
from typing import Any

Wake = SimpleQueue[Any]  # nobody looks at what is in it

_put = SimpleQueue.put
_nothing = repeat(None)


def waking(sleepers: list[Wake]) -> Iterator[None]:
    """What wakes all sleepers when it is run through, by ``any()``; also those who come until then."""
    return map(_put, sleepers, _nothing)


def sleep(
    over: Callable[[], bool], sleepers: list[Wake], timeout: float | None = None, wake: Wake | None = None
) -> bool:
    """Block until something is over, which whoever ends it says by :func:`waking`.

    Args:
        over: whether it is; asked again after every wake.
        sleepers: those whom the end wakes.
        timeout: seconds to wait at most.
        wake: the caller's own queue, where others may wake it as well.

    Returns:
        Whether it was over in time.
    """
    if over():
        return True
    mine: Wake = SimpleQueue() if wake is None else wake
    end = None if timeout is None else time.monotonic() + timeout
    sleepers.append(mine)
    try:
        while not over():
            if end is None:
                mine.get()
                continue
            left = end - time.monotonic()
            if left <= 0:
                return False
            try:
                mine.get(timeout=left)
            except Empty:
                return over()
        return True
    finally:
        sleepers.remove(mine)


class Latch:
    """An event that happens once.

    Attributes:
        happened: whether it has.
        sleepers: those who wait for it.

    >>> latch = Latch()
    >>> latch.wait(0), latch.set(), latch.wait(), latch.is_set()
    (False, None, True, True)
    """

    __slots__ = ("happened", "sleepers")

    def __init__(self) -> None:
        self.happened = False
        self.sleepers: list[Wake] = []

    def is_set(self) -> bool:
        """Whether it has happened."""
        return self.happened

    def set(self) -> None:
        """It happens."""
        wakes = waking(self.sleepers)
        self.happened = True  # from here to the end of any() no signal is looked at
        any(wakes)

    def wait(self, timeout: float | None = None, wake: Wake | None = None) -> bool:
        """Block until it has happened, at most ``timeout`` seconds; whether it has."""
        return sleep(self.is_set, self.sleepers, timeout, wake)
