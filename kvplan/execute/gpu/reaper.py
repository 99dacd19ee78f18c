"""The reaper: an executor's thread, which issues pending transfers, and takes back what ended ones have borrowed."""

from __future__ import annotations

import contextlib
import time
import warnings
from typing import Any

from kvplan.base.process import EXECUTORS, at_exit, generation
from kvplan.base.threads import Bell, Worker
from kvplan.errors import TransferError

# Between two looks at the transfers in flight. A look needs the interpreter, and an engine's thread that launches
# kernels then waits until it gets it back. Looks every 20 ms took 0.2 to 0.5 ms of a first token after 25 ms. Submits
# look, too, when a lane holds some transfers.
LOOK_SECONDS = 0.1
# Looks with no transfer in flight before the thread sleeps until it is woken. To wake it costs a submit time.
IDLE_LOOKS = 20
STOPPED_LOOK_SECONDS = 1e-3
EXIT_SECONDS = 15.0  # agents and the host path wait before: 30 s in all


_live: set[Reaper] = set()


class Reaper:
    """A thread that starts with the first submit, and ends when its executor is stopped and all transfers have ended.

    It keeps the executor's parts alive until then, even if the executor itself is deleted.

    Args:
        backend: the executor: a :class:`kvplan.execute.gpu.backend.GpuBackend`.

    Attributes:
        asleep: whether a submit must wake the thread.
        started: whether the thread was started.
    """

    def __init__(self, backend: Any) -> None:
        self.asleep = True
        self.started = False
        self._backend = backend
        self._bell = Bell()
        what = "no thread keeps what a GPU executor has in flight"
        self._worker = Worker("kvplan-reaper", self._serve, what, backend.threads)

    def start(self) -> None:
        """Start the thread, once. The executor's lock is held.

        Raises:
            TransferError: the system cannot start it.
        """
        if not self.started:
            _live.add(self)
            at_exit(EXECUTORS, _drain_at_exit)
            self._worker.start()
            self.started = True

    def wake(self) -> None:
        """Let the thread look now. Any thread may call it."""
        self._bell.ring()

    def join(self, timeout: float | None = None) -> bool:
        """Wait for the thread's end; return whether it has ended. In the thread itself, do not wait."""
        return self._worker.join(timeout)

    def _serve(self) -> None:
        backend, idle = self._backend, 0
        while not backend.closed:
            self.asleep = idle >= IDLE_LOOKS
            if self.asleep and not backend.busy():
                backend.trim()
                self._bell.wait()
            else:
                self._bell.wait(LOOK_SECONDS)
            self.asleep = False
            idle = 0 if backend.look() else idle + 1
        while backend.look():
            self._bell.wait(STOPPED_LOOK_SECONDS)
        with contextlib.suppress(TransferError):  # if the context is lost, nothing can be given back
            backend.tear_down()
        _live.discard(self)


def _drain_at_exit() -> None:
    """Wait for all submitted transfers, up to a limit."""
    reapers = [reaper for reaper in _live.copy() if reaper._backend.generation == generation()]
    for reaper in reapers:
        reaper._backend.stop()
    until = time.monotonic() + EXIT_SECONDS
    late = [reaper for reaper in reapers if not reaper.join(max(until - time.monotonic(), 0))]
    if late:
        count = sum(reaper._backend.in_flight() for reaper in late)
        message = f"at exit, {count} transfers of a GPU were given up: they have not ended in {EXIT_SECONDS:.0f} s"
        warnings.warn(message, RuntimeWarning, stacklevel=1)
