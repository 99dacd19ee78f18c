"""The thread that makes progress for NIXL: it looks for notes, moves packed transfers on, and naps."""

from __future__ import annotations

import ctypes
import logging
import os
import time
from collections.abc import Callable

from kvplan.base.threads import Bell, Worker

SPIN_SECONDS = 50e-6  # after a look that moved a transfer on: the next ones follow without a nap
BUSY_NAP = 20e-6  # seconds between two looks while transfers are in flight, whose bytes may move by looks
PATIENT_NAP = 1e-4  # the same of a GPU's memory, or with a thread of NIXL: a chunk takes longer, and others follow
RECENT_SECONDS = 2e-3  # since something moved: the next transfer is likely to come soon
IDLE_NAP = 2e-4  # the same when nothing is in flight: a peer's direct transfer over TCP moves on by these looks
REST_NAP = 2e-3  # the same after REST_SECONDS
REST_SECONDS = 10.0
REST_SHARE = 0.01  # a nap's share of the time without a transfer, where NIXL moves direct ones by a thread

TIMER_SLACK = 29  # PR_SET_TIMERSLACK of prctl
SLACK_NS = 1000  # the default is 50,000: a nap of 20 us then takes over 70

log = logging.getLogger("kvplan.agents")


class NixlProgress:
    """A thread that calls a function again and again.

    NIXL's own thread for this takes a whole core, also when nothing moves. This one naps between two looks, unless a
    transfer has just moved on: its next step is likely to be due before a nap would end.

    Args:
        look: does what can be done now; returns whether anything was done.
        busy: returns whether transfers are in flight.
        inside: identifiers of the agent's own threads; this one is added.
        driven: whether NIXL has a thread of its own, too.

    Attributes:
        patient: whether naps while transfers are in flight may be longer: chunks are large, or move without looks.
    """

    def __init__(
        self, look: Callable[[], bool], busy: Callable[[], bool], inside: set[int], *, driven: bool = False
    ) -> None:
        self._look, self._busy = look, busy
        self._driven = self.patient = driven
        self._bell = Bell()
        self._stopped = False
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
        _exact_naps()
        now = time.monotonic
        moved_at = now()
        while not self._stopped:
            try:
                moved = self._look()
                busy = moved or self._busy()
            except Exception:
                log.exception("the thread that makes progress for NIXL met an error")
                moved, busy = False, False
            if moved:
                moved_at = now()
            nap = self._nap(now() - moved_at, busy=busy)
            if not nap:
                os.sched_yield()  # lets the threads run that gather, scatter, or wait for the interpreter
            elif self._bell.wait(nap):
                moved_at = now()

    def _nap(self, seconds: float, *, busy: bool) -> float:
        """Return the seconds of a nap, from those since something moved, or since the thread was woken."""
        if busy:
            return 0.0 if seconds < SPIN_SECONDS else PATIENT_NAP if self.patient else BUSY_NAP
        if seconds < RECENT_SECONDS:
            return BUSY_NAP
        if self._driven:
            return min(seconds * REST_SHARE, REST_NAP)
        return IDLE_NAP if seconds < REST_SECONDS else REST_NAP


def _exact_naps() -> None:
    """Let naps of the calling thread end when they should, and not up to 50 us later."""
    ctypes.CDLL(None).prctl(TIMER_SLACK, ctypes.c_ulong(SLACK_NS), 0, 0, 0)
