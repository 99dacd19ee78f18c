"""What the backends of a CPU and of a GPU share: a thread, who may submit, and how an executor ends."""

from __future__ import annotations

import threading
import time
import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from kvplan.base.process import EXECUTORS, at_exit, check_process, generation
from kvplan.base.threads import Bell, Worker
from kvplan.errors import TransferError
from kvplan.execute.stats import Tally
from kvplan.execute.transfer import OwnTransfer, call_when_done

CLOSED_ERROR = "the executor is closed; submit before close()"
WITHIN_ERROR = "this submit came within another call of the executor, in a signal handler or a finalizer; submit later"
EXIT_SECONDS = 15.0  # time that an exit waits for all executors; agents and pools wait for themselves, 30 s in all


class Backend(ABC):
    """The part of an executor that moves bytes, and its thread.

    The thread starts with the first submit, and ends when the executor is stopped and all transfers have ended. It
    keeps this object alive until then, even if the executor itself is deleted.

    Args:
        name: name of the thread.
        what: start of the error's text if the system cannot start it.

    Attributes:
        generation: generation of the process that made it; see :mod:`kvplan.base.process`.
        tally: sums over ended transfers.
        lock: held while a submit queues or issues a transfer.
        closed: whether it accepts no more transfers.
        started: whether the thread was started.
        threads: identifiers of its own threads that run Python, which cannot wait for its end.
        submitter: the thread that submits, or 0.
        bell: wakes the thread.
    """

    def __init__(self, name: str, what: str) -> None:
        self.generation = generation()
        self.tally, self.lock, self.bell = Tally(), threading.RLock(), Bell()
        self.threads: set[int] = set()
        self.closed = self.started = False
        self.submitter = 0
        self._worker = Worker(name, self._serve, what, self.threads)

    def check_open(self) -> None:
        """Raise TransferError if it is closed or belongs to another process."""
        check_process(self.generation)
        if self.closed:
            raise TransferError(CLOSED_ERROR)

    def start(self) -> None:
        """Start the thread, once. The lock is held.

        Raises:
            TransferError: the system cannot start it.
        """
        if not self.started:
            _started.add(self)
            at_exit(EXECUTORS, _drain_at_exit)
            self._worker.start()
            self.started = True

    def take(self, transfer: OwnTransfer, put: Callable[[Any], object]) -> None:
        """Put a transfer where it is issued from, with the lock, and start the thread.

        Raises:
            TransferError: it is closed, or another call of this thread holds the lock; or ``put`` raises it.
        """
        with self.lock:
            if self.submitter:
                raise TransferError(WITHIN_ERROR)
            self.submitter = threading.get_ident()
            try:
                if self.closed:
                    raise TransferError(CLOSED_ERROR)
                if not self.started:
                    self.start()
                put(transfer)
            finally:
                self.submitter = 0

    def stop(self) -> None:
        """Accept no more transfers, and return at once: a finalizer may call it. Submitted transfers continue."""
        if self.generation == generation():
            self.closed = True
            self.bell.ring()

    def close(self) -> None:
        """Stop, and wait until all transfers have ended and everything is given back.

        It does not wait in a thread that waits for an ``after=``, or in a signal handler or a finalizer that
        interrupted a submit: the end of the transfers needs these threads.
        """
        self.stop()
        if self.generation == generation() and threading.get_ident() not in self.threads | {self.submitter}:
            with self.lock:  # a submit that found it open has started the thread
                pass
            self._worker.join()

    def completed(self, transfer: OwnTransfer, after: Any) -> bool:
        """Return whether a transfer's ``after`` has completed: then ``answers`` has its error, or None.

        The first call lets the thread be woken when it has.
        """
        if transfer.answers is None:
            answers = transfer.answers = []

            def answer(error: BaseException | None) -> None:
                answers.append(error)
                self.bell.ring()

            call_when_done(after, answer, self.threads)
        return bool(transfer.answers)

    def in_flight(self) -> int:
        """Return the number of transfers that are not known to have ended; 0 in a forked child, which has none."""
        return self._flying() if self.generation == generation() else 0

    def held(self) -> tuple[int, int]:
        """Return the bytes of GPU memory and of pinned memory that it holds."""
        return 0, 0

    @abstractmethod
    def _flying(self) -> int:
        """Return the number of transfers that are not known to have ended."""

    @abstractmethod
    def _serve(self) -> None:
        """Do the thread's work until all transfers have ended."""


_started: weakref.WeakSet[Backend] = weakref.WeakSet()


def _drain_at_exit() -> None:
    """Finish all submitted transfers, and tell of those that do not end in time."""
    backends = [backend for backend in list(_started) if backend.generation == generation()]
    for backend in backends:
        backend.stop()
    until = time.monotonic() + EXIT_SECONDS
    late = [backend for backend in backends if not backend._worker.join(max(until - time.monotonic(), 0))]
    left = sum(backend.in_flight() for backend in late)
    if left:
        message = f"at exit, {left} transfers were given up: they did not end within {EXIT_SECONDS:.0f} seconds"
        warnings.warn(message, RuntimeWarning, stacklevel=1)
