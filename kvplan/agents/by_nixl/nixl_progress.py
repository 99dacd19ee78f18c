"""The thread that makes progress for NIXL: it looks for notes, moves packed transfers on, and naps."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from queue import SimpleQueue

from kvplan.base.latch import Wake, woken
from kvplan.base.short_naps import exact_naps
from kvplan.base.threads import Worker

SPIN_SECONDS = 5e-5  # after a look that moved a transfer on: the next ones follow without a nap
BUSY_NAP = 20e-6  # seconds between two looks while transfers are in flight
RECENT_NAP = 30e-6  # the same when nothing is in flight: the next transfer of a peer is likely to come soon
RECENT_SECONDS = 0.02  # since a transfer was in flight
IDLE_NAP = 2e-4  # the same later: a peer's direct transfer over TCP moves on by these looks
REST_NAP = 2e-3  # the same after REST_SECONDS
REST_SECONDS = 10.0
REST_SHARE = 0.01  # a nap's share of the time without a transfer, where NIXL has a thread of its own for direct ones

log = logging.getLogger("kvplan.agents")


def nap_after(seconds: float, *, busy: bool, driven: bool = False) -> float:
    """Return the seconds until the next look.

    Args:
        seconds: since the last look that moved something, if transfers are in flight; since one was, otherwise.
        busy: whether transfers are in flight.
        driven: whether NIXL moves direct transfers on by itself, so that a nap delays the next packed one only.

    >>> [nap_after(seconds, busy=True) for seconds in (1e-6, 1e-3)]
    [0.0, 2e-05]
    >>> [nap_after(seconds, busy=False) for seconds in (1e-3, 1.0, 60.0)]
    [3e-05, 0.0002, 0.002]
    >>> [nap_after(seconds, busy=False, driven=True) for seconds in (1e-3, 0.05, 1.0)]
    [3e-05, 0.0005, 0.002]
    """
    if busy:
        return 0.0 if seconds < SPIN_SECONDS else BUSY_NAP
    if seconds < RECENT_SECONDS:
        return RECENT_NAP
    if driven:
        return min(seconds * REST_SHARE, REST_NAP)
    return IDLE_NAP if seconds < REST_SECONDS else REST_NAP


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
        looks: number of looks while transfers were in flight.
        waited: seconds between those looks, all together: as long as what arrived had to wait.
        longest: the longest of them.
    """

    def __init__(
        self, look: Callable[[], bool], busy: Callable[[], bool], inside: set[int], *, driven: bool = False
    ) -> None:
        self._look, self._busy, self._driven = look, busy, driven
        self._wake: Wake = SimpleQueue()
        self._stopped = False
        self.looks, self.waited, self.longest = 0, 0.0, 0.0
        self.thread = Worker("kvplan-nixl", self._serve, "no thread makes progress for NIXL", inside, naps=True)

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
        self._wake.put(None)

    def stop(self) -> None:
        """End the thread, and return at once."""
        self._stopped = True
        self._wake.put(None)

    def _serve(self) -> None:
        exact_naps()
        wake, now = self._wake, time.monotonic
        moved_at = active_at = now()
        before: float | None = None  # end of the look before, if transfers were in flight then
        while not self._stopped:
            if before is not None:
                self._count(now() - before)
            try:
                moved = self._look()
            except Exception:
                log.exception("the thread that makes progress for NIXL met an error")
                moved = False
            at, before = now(), None
            if moved:
                moved_at = at
            if self._busy():
                before = active_at = at
                nap = nap_after(at - moved_at, busy=True)
                if not nap:
                    time.sleep(0)  # lets the threads run that gather, scatter, or wait for the interpreter
                    continue
            else:
                nap = nap_after(at - active_at, busy=False, driven=self._driven)
            if woken(wake, nap):
                active_at = now()
                while not wake.empty():
                    wake.get()

    def _count(self, seconds: float) -> None:
        self.looks += 1
        self.waited += seconds
        self.longest = max(self.longest, seconds)
