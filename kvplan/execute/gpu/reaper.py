"""The reaper: a thread that takes back what ended transfers hold; and an exit that waits for the others."""

from __future__ import annotations

import atexit
import contextlib
import functools
import queue
import time
import warnings
import weakref
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from kvplan.base.process import generation
from kvplan.base.threads import Worker
from kvplan.errors import TransferError

LOOK_SECONDS = 0.02  # between two looks at what is in flight
# Looks with nothing in flight before its thread sleeps until woken: waking it costs the submit that does, and a thread
# that wakes beside a submit fights with it for the interpreter.
IDLE_LOOKS = 100
STOPPED_LOOK_SECONDS = 1e-3

_live: set[Reaper] = set()


class Alarm:
    """Wakes the reaper.

    Attributes:
        asleep: whether its thread sleeps until something is put in ``calls``.
        calls: not an Event, whose lock a collection of garbage in the wrong place would take twice.
    """

    def __init__(self) -> None:
        self.asleep = True
        self.calls: queue.SimpleQueue[object] = queue.SimpleQueue()


class Duties(NamedTuple):
    """Calls that the reaper makes.

    Attributes:
        reap: take back what ended transfers hold; returns how many transfers are left in flight.
        settle: add up what has ended.
        stop: take no more transfers.
        stop_lanes: let the lanes end behind what they have.
        ended: whether the lanes have ended, and no call of ``prepare`` is left.
        tear_down: give everything back to the driver.
        left: how many transfers and calls of ``prepare`` have not ended.
    """

    reap: Callable[[], int]
    settle: Callable[[], None]
    stop: Callable[[], None]
    stop_lanes: Callable[[], None]
    ended: Callable[[], bool]
    tear_down: Callable[[], None]
    left: Callable[[], tuple[int, int]]


class Reaper:
    """Lets go of ended transfers, so that memory lives no longer than its transfer, with or without another submit.

    Its thread sleeps while nothing is in flight. The thread keeps the executor's parts alive until all has ended, also
    where the executor itself was dropped.

    Args:
        duties: what it calls.
        alarm: what wakes it.
        inside: identifiers of threads that cannot wait for the executor's end; its own is added.
        exit_seconds: that the interpreter's exit waits for it.
    """

    def __init__(self, duties: Duties, alarm: Alarm, inside: set[int], exit_seconds: float) -> None:
        self.generation = generation()
        self.duties = duties
        self.alarm = alarm
        self.exit_seconds = exit_seconds
        self._stopped = False
        self._owner: weakref.ref[object] | None = None
        what = "no thread keeps what a GPU executor has in flight"
        self.thread = Worker(
            "kvplan-reaper", self._serve, what, inside,
            enter=partial(_live.add, self), leave=partial(_live.discard, self),
        )  # fmt: skip
        _hook_exit()

    def own(self, executor: object) -> None:
        """End when this object is gone, also where its finalizer is broken off."""
        self._owner = weakref.ref(executor, self.alarm.calls.put)  # one call of C

    def stop(self) -> None:
        """End once nothing is in flight any more."""
        self._stopped = True  # from here to the end of put no signal is looked at
        self.alarm.calls.put(None)

    def _serve(self) -> None:
        duties, alarm = self.duties, self.alarm
        while not self._stopped:
            alarm.calls.get()
            if self._owner is not None and self._owner() is None:
                duties.stop()
            idle = 0
            while idle < IDLE_LOOKS and not self._stopped:
                with contextlib.suppress(queue.Empty):
                    alarm.calls.get(timeout=LOOK_SECONDS)
                idle = 0 if duties.reap() else idle + 1
                duties.settle()
            alarm.asleep = True
            if duties.reap() and alarm.asleep:  # submitted since the last look
                alarm.asleep = False
                alarm.calls.put(None)
        duties.stop_lanes()
        while not duties.ended():
            time.sleep(STOPPED_LOOK_SECONDS)
        with contextlib.suppress(TransferError):  # the context may be lost: there is nothing to give back to then
            duties.tear_down()


@functools.cache
def _hook_exit() -> None:
    atexit.register(_drain_at_exit)


def _drain_at_exit() -> None:
    """Finish all that was submitted."""
    reapers = [reaper for reaper in _live.copy() if reaper.generation == generation()]
    for reaper in reapers:
        reaper.duties.stop()
    begun = time.monotonic()
    late = [one for one in reapers if not one.thread.join(max(begun + one.exit_seconds - time.monotonic(), 0))]
    if late:
        left = [reaper.duties.left() for reaper in late]
        count, calls = sum(transfers for transfers, _ in left), sum(waiting for _, waiting in left)
        what = f"{count} transfers of a GPU" + (f" and {calls} calls of prepare" if calls else "")
        seconds = max(reaper.exit_seconds for reaper in late)
        message = f"at exit, {what} were given up: they have not ended in {seconds:.0f} s"
        warnings.warn(message, RuntimeWarning, stacklevel=1)
