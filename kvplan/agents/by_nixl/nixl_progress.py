"""The thread that makes progress for NIXL: it looks for notes, moves packed transfers on, and naps."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue

from kvplan.base.latch import Wake
from kvplan.base.threads import Worker

BUSY_NAP = 20e-6  # seconds between two looks while transfers are in flight
IDLE_NAP = 2e-4  # seconds between two looks otherwise: a peer's transfer over TCP moves on by them
REST_NAP = 2e-3  # the same after REST_SECONDS without anything
REST_SECONDS = 10.0

log = logging.getLogger("kvplan.agents")


class NixlProgress:
    """A thread that calls a function again and again.

    NIXL's own thread for this takes a whole core, also when nothing moves. This one naps between two looks.

    Args:
        look: does what can be done now; returns whether anything was done.
        busy: returns whether transfers are in flight.
        inside: identifiers of the agent's own threads; this one is added.

    Attributes:
        looks: number of looks while transfers were in flight.
        waited: seconds between those looks, all together: as long as what arrived had to wait.
        longest: the longest of them.
    """

    def __init__(self, look: Callable[[], bool], busy: Callable[[], bool], inside: set[int]) -> None:
        self._look, self._busy = look, busy
        self._wake: Wake = SimpleQueue()
        self._stopped = False
        self.looks, self.waited, self.longest = 0, 0.0, 0.0
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
        self._wake.put(None)

    def stop(self) -> None:
        """End the thread, and return at once."""
        self._stopped = True
        self._wake.put(None)

    def _serve(self) -> None:
        last = time.monotonic()
        before: float | None = None  # end of the look before, if transfers were in flight then
        while not self._stopped:
            if before is not None:
                self._count(time.monotonic() - before)
            try:
                moved = self._look()
            except Exception:
                log.exception("the thread that makes progress for NIXL met an error")
                moved = False
            before = None
            if self._busy():
                before = last = time.monotonic()
                if not moved:
                    time.sleep(BUSY_NAP)
                continue
            nap = IDLE_NAP if time.monotonic() - last < REST_SECONDS else REST_NAP
            try:
                self._wake.get(timeout=nap)
            except Empty:
                continue
            last = time.monotonic()
            while not self._wake.empty():
                self._wake.get()

    def _count(self, seconds: float) -> None:
        self.looks += 1
        self.waited += seconds
        self.longest = max(self.longest, seconds)
