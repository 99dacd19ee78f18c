"""Threads that do their work once, and threads for waits that the caller can give up."""

from __future__ import annotations

import _thread
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Any

from kvplan.base.latch import Latch, Wake, bounded
from kvplan.errors import TransferError

Job = Callable[[], None]

FAULTS = frozenset(
    getattr(signal, f"SIG{name}") for name in ("SEGV", "BUS", "FPE", "ILL", "ABRT", "TRAP", "SYS")
    if hasattr(signal, f"SIG{name}")
)  # fmt: skip


def _block_signals() -> None:
    """Let other threads of this process take its signals, but for those that tell of this thread's own faults.

    Python runs handlers in its main thread anyway. A signal that another thread takes would divide its timed waits; see
    :func:`kvplan.base.latch.woken`. Processes that this thread starts block the signals, too.
    """
    if hasattr(signal, "pthread_sigmask"):  # not on Windows
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - FAULTS)


@dataclass(eq=False)
class Worker:
    """A daemon thread that is started on demand, does its work once, and reports its end.

    Ctrl-C in its start or in a wait for its end loses nothing: ``Thread.join`` would count a running thread as ended.

    Attributes:
        name: name of the thread.
        work: the work to do.
        what: start of the error message: the work that is not done without this thread.
        inside: identifiers of threads that must not wait for the executor's end; the worker adds its own.
        enter: function that is called before the thread starts.
        leave: function that is called when the thread has ended, or cannot be started.
        naps: whether the work has timed waits (:func:`kvplan.base.latch.woken`); such a thread takes no signals.
        ended: set when the work is done.
    """

    name: str
    work: Job
    what: str
    inside: set[int]
    enter: Callable[[], object] = bool
    leave: Callable[[], object] = bool
    naps: bool = False
    ended: Latch = field(default_factory=Latch)
    _thread: threading.Thread | None = None
    _claims: list[int] = field(default_factory=list)  # after Ctrl-C in a start, there may be two; the first works

    @property
    def started(self) -> bool:
        """Return whether the thread was ever started."""
        return self._thread is not None or bool(self._claims)

    def start(self) -> None:
        """Start the thread; raise TransferError if it cannot be started, and undo ``enter``."""
        thread = threading.Thread(target=self._serve, name=self.name, daemon=True)
        self.enter()
        try:
            thread.start()
        except BaseException as error:
            if not self.started:
                self.leave()
            if isinstance(error, RuntimeError):
                raise TransferError(f"{self.what}: {error}") from error
            raise
        self._thread = thread

    def join(self, timeout: float | None = None) -> bool:
        """Wait until the work has ended, if the thread was started; return whether it has ended."""
        if not self.started:
            return True
        if self._claims and self._claims[0] == _thread.get_ident():
            return self.ended.is_set()
        if not self.ended.wait(timeout):
            return False
        if self._thread is not None:
            self._thread.join(None if timeout is None else bounded(timeout))
        return True

    def _serve(self) -> None:
        me = _thread.get_ident()
        self._claims.append(me)
        if self._claims[0] == me:
            self.inside.add(me)
            try:
                if self.naps:
                    _block_signals()
                self.work()
            finally:
                self.inside.discard(me)  # a later thread may get this identifier
                self.ended.set()
                self.leave()


class Standby:
    """A thread that runs blocking calls for a caller, so that the caller can stop waiting for them.

    A wait for a user's event cannot be interrupted, but the transfer that named the event can be cancelled.

    Args:
        inside: identifiers of threads that must not wait for the executor's end; its own thread is added.
    """

    def __init__(self, inside: set[int]) -> None:
        self._inside = inside
        self._jobs: SimpleQueue[Job | None] | None = None
        self._ident = 0

    def wait(self, block: Callable[[], object], wake: Wake, given_up: Callable[[], bool]) -> BaseException | None:
        """Wait until a blocking call has returned; only one thread may call this method.

        Args:
            block: the blocking call.
            wake: the caller's queue, which gets an entry when ``given_up`` may have changed.
            given_up: a function that returns whether to stop waiting.

        Returns:
            The error that the call raised, or None.
        """
        ended: list[BaseException | None] = []

        def run() -> None:
            ended.append(error_of(block))
            wake.put(None)

        jobs = self._jobs or self._begin()
        if jobs is None:  # no more threads, so the caller itself blocks
            return error_of(block)
        jobs.put(run)
        while not ended and not given_up():
            wake.get()
        if ended:
            return ended[0]
        self.dismiss()
        return None

    def dismiss(self) -> None:
        """Make the thread end after its current call; from now on it may wait for the executor's end."""
        if self._jobs is not None:
            self._jobs.put(None)
            self._inside.discard(self._ident)
            self._jobs = None

    def _begin(self) -> SimpleQueue[Job | None] | None:
        jobs: SimpleQueue[Job | None] = SimpleQueue()
        thread = threading.Thread(target=partial(_serve, jobs), name="kvplan-after", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            return None
        self._ident = thread.ident or 0
        self._inside.add(self._ident)
        self._jobs = jobs
        return jobs


def held_here(lock: Any) -> Callable[[], bool]:
    """Return a function that returns whether the calling thread holds a reentrant lock."""
    held: Callable[[], bool] = lock._is_owned
    return held


def error_of(call: Callable[[], object]) -> BaseException | None:
    """Make a call and return the error that it raised, or None."""
    try:
        call()
    except BaseException as error:  # noqa: BLE001  # the caller decides whose error it is
        return error
    return None


def _serve(jobs: SimpleQueue[Job | None]) -> None:
    while (job := jobs.get()) is not None:
        job()
        del job  # otherwise the objects that the job waited for would stay alive
