"""Threads, and waits for them. Ctrl-C in a wait leaves no lock held that another thread takes."""

from __future__ import annotations

import threading
from collections.abc import Callable

from kvplan.errors import TransferError

Call = Callable[[], object]


class Latch:
    """An event that happens once, and then calls functions.

    Each waiting thread has a lock of its own. ``threading.Event`` takes a common one in Python code, where Ctrl-C could
    leave it held.

    Attributes:
        happened: whether the event has happened.

    >>> latch = Latch()
    >>> latch.wait(0), latch.set(), latch.wait(), latch.set()
    (False, True, True, False)
    """

    def __init__(self) -> None:
        self.happened = False
        self._lock = threading.Lock()
        self._calls: list[Call] = []

    def set(self) -> bool:
        """Let the event happen; return False if it has happened before."""
        with self._lock:
            first, self.happened = not self.happened, True
            calls, self._calls = self._calls, []
        for call in calls:
            call()
        return first

    def call(self, function: Call) -> None:
        """Call a function once: in the thread that sets the latch, or now if the event has happened."""
        with self._lock:
            if not self.happened:
                self._calls.append(function)
                return
        function()

    def wait(self, timeout: float | None = None) -> bool:
        """Block until the event has happened, at most ``timeout`` seconds; return whether it has happened."""
        bell = Bell()
        self.call(bell.ring)
        if not bell.wait(timeout):
            with self._lock:
                self._calls = [call for call in self._calls if call != bell.ring]
        return self.happened


class Bell:
    """Wakes a thread, any number of times. Rings before a wait count as one ring.

    >>> bell = Bell()
    >>> bell.ring(), bell.ring(), bell.wait(), bell.wait(0.001)
    (None, None, True, False)
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def ring(self) -> None:
        """Wake the thread that waits, or that waits next; any thread may call it, also in a signal handler."""
        try:  # a submit rings; suppress takes half a microsecond more
            self._lock.release()
        except RuntimeError:  # it has rung before
            pass

    def wait(self, seconds: float | None = None) -> bool:
        """Block until the bell rings, at most so long; return whether it rang. One thread at a time may wait."""
        return self._lock.acquire(timeout=-1 if seconds is None else min(max(seconds, 0), threading.TIMEOUT_MAX))


class Worker:
    """A daemon thread that is started on demand, and does its work once.

    Args:
        name: name of the thread.
        work: the work.
        what: start of the error message: what is not done without this thread.
        inside: identifiers of threads that must not wait for the owner's end, if it asks; the worker adds its own.

    Attributes:
        started: whether the thread was ever started.
    """

    def __init__(self, name: str, work: Call, what: str, inside: set[int] | None = None) -> None:
        self.started = False
        self._name, self._work, self._what, self._inside = name, work, what, set() if inside is None else inside
        self._once, self._ended = threading.Lock(), Latch()
        self._thread = threading.Thread()  # its own, as soon as that runs

    def start(self) -> None:
        """Start the thread; raise TransferError if the system cannot."""
        try:
            threading.Thread(target=self._serve, name=self._name, daemon=True).start()
        except RuntimeError as error:
            raise TransferError(f"{self._what}: {error}") from error
        self.started = True

    def join(self, timeout: float | None = None) -> bool:
        """Wait until the work has ended, if the thread was started and is another one; return whether it has ended.

        Ctrl-C in a ``Thread.join`` alone lets the thread count as ended, up to Python 3.12.
        """
        if self.started and self._thread is not threading.current_thread() and self._ended.wait(timeout):
            self._thread.join(timeout)
        return self._ended.happened or not self.started

    def _serve(self) -> None:
        if not self._once.acquire(blocking=False):
            return  # another thread does the work: two were started at once, or Ctrl-C came in a start
        self._thread, me = threading.current_thread(), threading.get_ident()
        self.started = True
        self._inside.add(me)
        try:
            self._work()
        finally:
            self._inside.discard(me)  # a later thread may get this identifier
            self._ended.set()


def error_of(call: Call) -> BaseException | None:
    """Make a call and return the error that it raised, or None."""
    try:
        call()
    except BaseException as error:  # the caller decides whose error it is
        return error
    return None
