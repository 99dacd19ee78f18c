"""How GPU executors end: what has passed is let go of, and an exit waits for what has not."""

from __future__ import annotations

import atexit
import contextlib
import functools
import queue
import time
import warnings
from functools import partial
from typing import TYPE_CHECKING

from kvplan.base.process import generation
from kvplan.base.threads import Worker
from kvplan.errors import TransferError

if TYPE_CHECKING:
    from kvplan.execute.gpu.backend import Runtime

LOOK_SECONDS = 0.02  # between two looks at what is in flight
# Looks with nothing in flight before its thread sleeps until woken: waking it costs the submit that does, and a thread
# that wakes beside a submit fights with it for the interpreter.
IDLE_LOOKS = 100
STOPPED_LOOK_SECONDS = 1e-3
EXIT_SECONDS = 30.0  # that an exit waits for transfers, and calls of prepare, that do not end

_live: set[Keeper] = set()


class Keeper:
    """Lets go of ended transfers, so that memory lives no longer than its transfer, submits or none.

    Its thread sleeps while nothing is in flight. It is what keeps the runtime of a dropped executor alive until all
    has ended.
    """

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        # Not an Event, whose lock a collection of garbage in the wrong place would take twice.
        self.calls: queue.SimpleQueue[object] = queue.SimpleQueue()
        self.asleep = True
        self._stopped = False
        what = "no thread keeps what a GPU executor has in flight"
        self.thread = Worker(
            "kvplan-keeper", self._keep, what, runtime.inside,
            enter=partial(_live.add, self), leave=partial(_live.discard, self),
        )  # fmt: skip
        _hook_exit()

    def stop(self) -> None:
        """End once nothing is in flight any more."""
        self._stopped = True  # from here to the end of put no signal is looked at
        self.calls.put(None)

    def _keep(self) -> None:
        runtime = self.runtime
        while not self._stopped:
            self.calls.get()
            if runtime.owner is not None and runtime.owner() is None:
                runtime.stop()
            idle = 0
            while idle < IDLE_LOOKS and not self._stopped:
                with contextlib.suppress(queue.Empty):
                    self.calls.get(timeout=LOOK_SECONDS)
                idle = 0 if runtime.reap() else idle + 1
                runtime.tally.settle()
            self.asleep = True
            if runtime.reap() and self.asleep:  # submitted since the last look
                self.asleep = False
                self.calls.put(None)
        runtime.stop_lanes()
        while not all(lane.thread.join(0) for lane in runtime.lanes.values()) or runtime.reap() or runtime.preparing:
            time.sleep(STOPPED_LOOK_SECONDS)
        with contextlib.suppress(TransferError):  # the context may be lost: there is nothing to give back to then
            runtime.tear_down()


@functools.cache
def _hook_exit() -> None:
    atexit.register(_drain_at_exit)


def _drain_at_exit() -> None:
    """Finish all that was submitted."""
    keepers = [keeper for keeper in _live.copy() if keeper.runtime.generation == generation()]
    for keeper in keepers:
        keeper.runtime.stop()
    until = time.monotonic() + EXIT_SECONDS
    left = [keeper for keeper in keepers if not keeper.thread.join(max(until - time.monotonic(), 0))]
    if left:
        count = sum(len(lane.flying) + lane.queued for keeper in left for lane in keeper.runtime.lanes.values())
        calls = sum(len(keeper.runtime.preparing) for keeper in left)
        what = f"{count} transfers of a GPU" + (f" and {calls} calls of prepare" if calls else "")
        message = f"at exit, {what} were given up: they have not ended in {EXIT_SECONDS:.0f} s"
        warnings.warn(message, RuntimeWarning, stacklevel=1)
