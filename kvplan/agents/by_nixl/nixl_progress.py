"""The thread that makes progress for NIXL: it looks for notes, moves packed transfers on, and naps."""

from __future__ import annotations

import ctypes
import logging
import os
import time
from collections.abc import Callable

from kvplan.base.threads import Bell, Worker

SPIN_SECONDS = 50e-6  # after a look that found something: the next ones follow without a nap
BUSY_NAP = 1e-4  # seconds between two looks while transfers are in flight
IDLE_NAP = 2e-4  # the same when nothing is in flight: a peer's direct transfer over TCP moves on by these looks
REST_NAP = 2e-3  # the same after REST_SECONDS
REST_SECONDS = 10.0

TIMER_SLACK = 29  # PR_SET_TIMERSLACK of prctl
SLACK_NS = 1000  # the default is 50,000: a nap of 100 us then takes over 150

log = logging.getLogger("kvplan.agents")


class NixlProgress:
    """A thread that calls a function again and again. NIXL's own thread for this takes a whole core.

    Args:
        look: does what can be done now; returns whether anything was done.
        busy: returns whether transfers are in flight.
        inside: identifiers of the agent's own threads; this one is added.
    """

    def __init__(self, look: Callable[[], bool], busy: Callable[[], bool], inside: set[int]) -> None:
        self._look, self._busy = look, busy
        self._bell = Bell()
        self._stopped = False
        self._failed = ""  # the error of the last look, which is logged once
        self.thread = Worker("kvplan-nixl", self._serve, "no thread makes progress for NIXL", inside)

    @property
    def running(self) -> bool:
        """Whether the thread was started, and was not told to end."""
        return self.thread.started and not self._stopped

    def start(self) -> None:
        """Start the thread, if it does not run; raise TransferError if the system cannot."""
        if not self.thread.started and not self._stopped:
            self.thread.start()

    def wake(self) -> None:
        """Let the thread look now."""
        self._bell.ring()

    def stop(self) -> None:
        """End the thread, and return at once."""
        self._stopped = True
        self._bell.ring()

    def _serve(self) -> None:
        ctypes.CDLL(None).prctl(TIMER_SLACK, ctypes.c_ulong(SLACK_NS), 0, 0, 0)
        found_at = time.monotonic()
        while not self._stopped:
            found, now = self._looked(), time.monotonic()
            if found:
                found_at = now
            since = now - found_at
            if since < SPIN_SECONDS:
                os.sched_yield()  # lets the threads run that gather, scatter, or wait for the interpreter
            else:
                nap = BUSY_NAP if self._busy() else IDLE_NAP if since < REST_SECONDS else REST_NAP
                if self._bell.wait(REST_NAP if self._failed else nap):
                    found_at = time.monotonic()

    def _looked(self) -> bool:
        try:
            found = self._look()
        except Exception as error:
            if str(error) != self._failed:
                log.exception("the thread that makes progress for NIXL met an error")
            self._failed = str(error) or type(error).__name__
            return False
        self._failed = ""
        return found
