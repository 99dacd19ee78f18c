"""The service thread of an agent: it waits for sockets and processes, and calls whoever watches them."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable

from kvplan.base.threads import Worker

log = logging.getLogger("kvplan.agents")


class Watcher(ABC):
    """An object that the service thread serves. All its methods are called in that thread, and none may block."""

    def files(self) -> dict[int, int]:
        """Return the descriptors to wait for, each with the events of ``poll``; none if it needs no more service."""
        return {}

    def due(self) -> float | None:
        """Return when to call :meth:`serve` at the latest, as ``time.monotonic`` counts; None if only for events."""
        return None

    @abstractmethod
    def serve(self) -> None:
        """Do what can be done now: an event has come, the time is due, or :meth:`Loop.wake` was called."""


class Loop:
    """The service thread. It starts with :meth:`start`, and ends after :meth:`stop`."""

    def __init__(self) -> None:
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._watchers: dict[int, Watcher] = {}
        self._stopped = False
        self._closing = threading.RLock()
        self.thread = Worker("kvplan-agent", self._serve, "no thread serves the peers of an agent")

    def start(self) -> None:
        """Start the thread, if it does not run; raise TransferError if the system cannot."""
        if not self.thread.started:
            self.thread.start()

    def add(self, watcher: Watcher) -> None:
        """Serve a watcher until :meth:`remove`."""
        self._watchers[id(watcher)] = watcher
        self.wake()

    def remove(self, watcher: Watcher) -> None:
        """Serve a watcher no more."""
        self._watchers.pop(id(watcher), None)
        self.wake()

    def wake(self) -> None:
        """Let the thread look at all watchers again; any thread may call it."""
        with self._closing, contextlib.suppress(BlockingIOError):  # once closed, the number may be another file's
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)

    def stop(self) -> None:
        """End the thread, and return at once."""
        self._stopped = True
        self.wake()
        if not self.thread.started:
            self._close()

    def drop(self) -> None:
        """Close the thread's descriptor in a forked child, where the thread does not run."""
        self._stopped = True
        self._closing = threading.RLock()  # a thread of the parent may hold it
        self._close()

    def _close(self) -> None:
        with self._closing:
            fd, self._wake = self._wake, -1
            if fd >= 0:
                os.close(fd)

    def _serve(self) -> None:
        try:
            while not self._stopped:
                for watcher in self._wait():
                    guarded(watcher.serve)
        finally:
            self._close()

    def _wait(self) -> list[Watcher]:
        """Wait, and return the watchers to serve: those that have an event or are due, or all after a wake."""
        poll, watchers = select.poll(), list(self._watchers.values())
        poll.register(self._wake, select.POLLIN)
        owners, dues = dict[int, Watcher](), dict[int, float]()
        for watcher in watchers:
            for fd, events in watcher.files().items():
                if fd >= 0:
                    poll.register(fd, events)
                    owners[fd] = watcher
            if (at := watcher.due()) is not None:
                dues[id(watcher)] = at
        timeout = max(0.0, min(dues.values()) - time.monotonic()) * 1000 if dues else None
        ready = {fd for fd, _ in poll.poll(timeout)}
        if self._wake in ready:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake)
            return list(self._watchers.values())
        now, some = time.monotonic(), {id(owners[fd]) for fd in ready}
        return [one for one in watchers if id(one) in some or dues.get(id(one), now + 1) <= now]


def guarded(call: Callable[[], object]) -> None:
    """Call a function of a watcher; an error must not end the service of the others."""
    try:
        call()
    except Exception:
        log.exception("the service thread of an agent met an error")
