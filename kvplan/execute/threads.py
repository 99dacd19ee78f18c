"""Threads that are started whole or not at all, and work that no signal comes into."""

from __future__ import annotations

import _thread
import threading
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar, cast

from kvplan.base.latch import Latch, Wake, sleep
from kvplan.errors import TransferError
from kvplan.execute.transfer import HostTransfer, wait_for

Made = TypeVar("Made")


acting: set[int] = set()  # identifiers of threads that do something for one that waits, and may hold locks


def aside(make: Callable[[], Made]) -> Made:
    """Call a function where Python runs no signal's handler: in a thread that is not the main one.

    What it makes and registers is then there, whole, even where the caller is interrupted while it waits. Only for
    what is done seldom: starting the thread takes some 50 us.
    """
    if _thread.get_ident() != threading.main_thread().ident:
        return make()
    told: SimpleQueue[tuple[BaseException | None, Made | None]] = SimpleQueue()
    try:
        _thread.start_new_thread(_call, (make, told))  # one call of C, unlike Thread.start
    except RuntimeError:  # no more threads
        return make()
    error, made = told.get()
    if error is not None:
        raise error
    return cast("Made", made)


def _call(make: Callable[[], Made], told: SimpleQueue[tuple[BaseException | None, Made | None]]) -> None:
    me = _thread.get_ident()
    acting.add(me)
    try:
        told.put((None, make()))
    except BaseException as error:  # noqa: BLE001  # it is the caller's
        told.put((error, None))
    finally:
        acting.discard(me)


class Worker:
    """A daemon thread that is started when it is needed, does its work once, and says when it has ended.

    ``Thread.start`` and ``Thread.join`` wait by Python's means: interrupted there, a thread may never come to its work,
    or count as ended while it runs.

    Args:
        name: of the thread.
        work: what it does.
        what: is not done without it, for the message.
        inside: identifiers of threads that must not wait for the executor's end; its own is added.
        enter: called before it is started.
        leave: called when it has ended, or cannot be started.

    Attributes:
        ended: its work is done.
    """

    def __init__(
        self, name: str, work: Callable[[], None], what: str, inside: set[int], *,
        enter: Callable[[], object] = bool, leave: Callable[[], object] = bool,
    ) -> None:  # fmt: skip
        self._name = name
        self._work = work
        self._what = what
        self._inside = inside
        self._enter = enter
        self._leave = leave
        self._threads: list[threading.Thread] = []
        self._claims: list[int] = []  # of threads that were started at once, the first does the work
        self.ended = Latch()

    @property
    def started(self) -> bool:
        """Whether there is a thread, or was."""
        return bool(self._threads)

    def start(self) -> None:
        """Start the thread.

        Raises:
            TransferError: the system, or an interpreter that ends, starts no more threads; nothing is left behind.
        """
        try:
            aside(self._start)
        except RuntimeError as error:
            raise TransferError(f"{self._what}: {error}") from error

    def join(self, timeout: float | None = None) -> bool:
        """Wait for the end, if it was started; whether it has come."""
        if not self.started:
            return True
        if self._claims and self._claims[0] == _thread.get_ident():
            return self.ended.is_set()
        if not self.ended.wait(timeout):
            return False
        for thread in self._threads:
            thread.join(timeout)
        return True

    def _start(self) -> None:
        thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
        self._enter()
        try:
            thread.start()
        except BaseException:
            if not self._threads:
                self._leave()
            raise
        self._threads.append(thread)

    def _serve(self) -> None:
        me = _thread.get_ident()
        self._claims.append(me)
        if self._claims[0] == me:
            self._inside.add(me)
            try:
                self._work()
            finally:
                self._inside.discard(me)  # the next thread may get its number
                self.ended.set()
                self._leave()


class Standby:
    """Waits for what is not kvplan's, in a thread of its own, so that whoever waits for it can give up.

    Such a wait, of an ``after=``, cannot be cut short; but the transfer that named it can be taken back.

    Args:
        inside: identifiers of threads that must not wait for the executor's end; its thread is among them.
    """

    def __init__(self, inside: set[int]) -> None:
        self._inside = inside
        self._jobs: SimpleQueue[Callable[[], None] | None] | None = None
        self._ident = 0

    def wait(self, after: Any, wake: Wake, given_up: Callable[[], bool]) -> BaseException | None:
        """Block until something has happened; called by one thread.

        Args:
            after: what ``submit`` was given.
            wake: the caller's queue, into which something is put when ``given_up`` may have changed.
            given_up: whether to wait no longer.

        Returns:
            What went wrong with it, or None.
        """
        if after is None:
            return None
        if isinstance(after, HostTransfer):
            sleep(lambda: after.done() or given_up(), after.sleepers, None, wake)
            return _outcome(after) if after.done() else None
        happened: list[BaseException | None] = []

        def look() -> None:
            happened.append(_outcome(after))
            wake.put(None)

        jobs = self._jobs or self._begin()
        if jobs is None:  # no more threads: then the caller waits itself
            return _outcome(after)
        jobs.put(look)
        while not happened and not given_up():
            wake.get()
        if happened:
            return happened[0]
        self.dismiss()
        return None

    def dismiss(self) -> None:
        """End the thread, when it has waited; it may wait for the executor's end now."""
        if self._jobs is not None:
            self._jobs.put(None)
            self._inside.discard(self._ident)
            self._jobs = None

    def _begin(self) -> SimpleQueue[Callable[[], None] | None] | None:
        jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        thread = threading.Thread(target=partial(_serve, jobs), name="kvplan-after", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            return None
        self._ident = thread.ident or 0
        self._inside.add(self._ident)
        self._jobs = jobs
        return jobs


def _outcome(after: Any) -> BaseException | None:
    try:
        wait_for(after)
    except BaseException as error:  # noqa: BLE001  # it belongs to the transfer
        return error
    return None


def _serve(jobs: SimpleQueue[Callable[[], None] | None]) -> None:
    while (job := jobs.get()) is not None:
        job()
        del job  # else what it waited for would live on
