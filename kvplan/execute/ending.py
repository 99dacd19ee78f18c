"""How GPU executors end: what has passed is let go of, and an exit waits for what has not."""

from __future__ import annotations

import atexit
import contextlib
import functools
import queue
import threading
import time
import warnings
from typing import TYPE_CHECKING

from kvplan.errors import TransferError
from kvplan.execute.forks import generation

if TYPE_CHECKING:
    from kvplan.execute.runtime import Runtime

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
        self._runtime = runtime
        # Not an Event, whose lock a collection of garbage in the wrong place would take twice.
        self._calls: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._asleep = True
        self._stopped = False
        self._thread = threading.Thread(target=self._keep, name="kvplan-keeper", daemon=True)
        _hook_exit()
        _live.add(self)
        self._thread.start()

    def wake(self) -> None:
        """Something is in flight."""
        if self._asleep:
            self._asleep = False
            self._calls.put(None)

    def stop(self) -> None:
        """End once nothing is in flight any more."""
        self._stopped = True
        self._calls.put(None)

    def join(self, timeout: float | None = None) -> bool:
        """Wait for that; whether it has come."""
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def _keep(self) -> None:
        runtime = self._runtime
        while not self._stopped:
            self._calls.get()
            idle = 0
            while idle < IDLE_LOOKS and not self._stopped:
                with contextlib.suppress(queue.Empty):
                    self._calls.get(timeout=LOOK_SECONDS)
                idle = 0 if runtime.reap() else idle + 1
            self._asleep = True
            if runtime.reap():  # submitted since the last look
                self.wake()
        while not all(lane.join(0) for lane in runtime.lanes.values()) or runtime.reap() or runtime.preparing:
            time.sleep(STOPPED_LOOK_SECONDS)
        with contextlib.suppress(TransferError):  # the context may be lost: there is nothing to give back to then
            runtime.tear_down()
        _live.discard(self)


@functools.cache
def _hook_exit() -> None:
    atexit.register(_drain_at_exit)


def _drain_at_exit() -> None:
    """Finish all that was submitted."""
    keepers = [keeper for keeper in tuple(_live) if keeper._runtime.generation == generation()]
    for keeper in keepers:
        keeper._runtime.stop()
    until = time.monotonic() + EXIT_SECONDS
    left = [keeper for keeper in keepers if not keeper.join(max(until - time.monotonic(), 0))]
    if left:
        count = sum(len(lane.flying) + lane.queued for keeper in left for lane in keeper._runtime.lanes.values())
        calls = sum(len(keeper._runtime.preparing) for keeper in left)
        what = f"{count} transfers of a GPU" + (f" and {calls} calls of prepare" if calls else "")
        message = f"at exit, {what} were given up: they have not ended in {EXIT_SECONDS:.0f} s"
        warnings.warn(message, RuntimeWarning, stacklevel=1)
