"""The reaper: a thread that takes back the loans of ended transfers; and an exit hook that waits for transfers."""

from __future__ import annotations

import contextlib
import queue
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from kvplan.base.latch import woken
from kvplan.base.process import EXECUTORS, at_exit, generation
from kvplan.base.threads import Worker
from kvplan.errors import TransferError

# Between two looks at the transfers in flight. A look needs the interpreter, and an engine's thread that launches
# kernels then waits until it gets it back. Looks every 20 ms took 0.2 to 0.5 ms of a first token after 25 ms. Submits
# look, too, when a lane holds some transfers.
LOOK_SECONDS = 0.1
# Number of looks with no transfer in flight before the thread sleeps until it is woken. To wake it costs a submit time,
# and a thread that wakes during a submit competes with it for the interpreter.
IDLE_LOOKS = 20
STOPPED_LOOK_SECONDS = 1e-3

_live: set[Reaper] = set()


class Alarm:
    """An object that wakes the reaper.

    Attributes:
        asleep: whether the reaper's thread sleeps until an object is put in ``calls``.
        calls: a queue. An Event would not do: a finalizer could take its lock while the same thread holds it.
    """

    def __init__(self) -> None:
        self.asleep = True
        self.calls: queue.SimpleQueue[object] = queue.SimpleQueue()


class Duties(NamedTuple):
    """Functions of the executor that the reaper calls.

    Attributes:
        reap: takes back the loans of ended transfers; returns how many transfers are left in flight.
        settle: adds ended transfers to the statistics.
        stop: accepts no more transfers.
        stop_lanes: stops the lanes after their pending transfers.
        ended: returns whether lanes and transfers have ended, and all calls of ``prepare`` have returned.
        tear_down: gives all resources back to the driver.
        left: returns how many transfers, and how many calls of ``prepare``, have not ended.
    """

    reap: Callable[[], int]
    settle: Callable[[], None]
    stop: Callable[[], None]
    stop_lanes: Callable[[], None]
    ended: Callable[[], bool]
    tear_down: Callable[[], None]
    left: Callable[[], tuple[int, int]]


class Reaper:
    """A thread that takes back the loans of ended transfers, even if no other submit follows.

    The thread sleeps while no transfer is in flight. It keeps the executor's parts alive until all transfers have
    ended, even if the executor itself is deleted.

    Args:
        duties: the functions that it calls.
        alarm: the object that wakes it.
        inside: identifiers of threads that cannot wait for the executor's end; the reaper adds its own.
        exit_seconds: seconds that the interpreter's exit waits for it.
    """

    def __init__(self, duties: Duties, alarm: Alarm, inside: set[int], exit_seconds: float) -> None:
        self.generation = generation()
        self.duties = duties
        self.alarm = alarm
        self.exit_seconds = exit_seconds
        self._stopped = False
        what = "no thread keeps what a GPU executor has in flight"
        self.thread = Worker(
            "kvplan-reaper", self._serve, what, inside,
            enter=partial(_live.add, self), leave=partial(_live.discard, self), naps=True,
        )  # fmt: skip
        at_exit(EXECUTORS, _drain_at_exit)

    def stop(self) -> None:
        """Let the thread end after all transfers have ended."""
        self._stopped = True
        self.alarm.calls.put(None)

    def _serve(self) -> None:
        duties, alarm = self.duties, self.alarm
        while not self._stopped:
            alarm.calls.get()
            idle = 0
            while idle < IDLE_LOOKS and not self._stopped:
                woken(alarm.calls, LOOK_SECONDS)
                idle = 0 if duties.reap() else idle + 1
                duties.settle()
            alarm.asleep = True
            if duties.reap() and alarm.asleep:  # submitted since the last look
                alarm.asleep = False
                alarm.calls.put(None)
        duties.stop_lanes()
        while not duties.ended():
            time.sleep(STOPPED_LOOK_SECONDS)
        with contextlib.suppress(TransferError):  # if the context is lost, nothing can be given back
            duties.tear_down()


def _drain_at_exit() -> None:
    """Wait for all submitted transfers, up to the limit of each executor."""
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
