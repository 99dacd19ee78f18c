"""The thread that runs the host path's transfers of one priority, one after another."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Protocol

from kvplan.base.latch import Wake, sleep
from kvplan.base.threads import Standby, Worker
from kvplan.execute.host.crew import Crew
from kvplan.execute.host.host_transfer import HostTransfer
from kvplan.execute.stats import Tally
from kvplan.execute.transfer import wait_on_cpu

live: set[Runner] = set()  # runners whose thread may still have work; an exit waits for them


class Dealer(Protocol):
    """The host path, as its runners see it.

    Attributes:
        generation: the process that it belongs to.
        threads: how many threads copy a transfer.
        tally: adds up results.
        inside: identifiers of the path's own threads.
        urgent: the runner of high priority.
        stir: wakes the other runner.
    """

    generation: int
    threads: int
    tally: Tally
    inside: set[int]
    urgent: Runner
    stir: Callable[[], object]

    def load(self) -> None:
        """Load the loops that copy."""

    def look(self) -> None:
        """Stop if nobody can submit any more."""

    def deal_out(self) -> None:
        """Give each runner its transfers."""

    def dealt_out(self) -> bool:
        """Whether the path is closed and each runner has its transfers."""

    def run(self, transfer: HostTransfer, crew: Crew, error: BaseException | None) -> None:
        """Copy a transfer, or end it with an error."""

    def stop(self) -> None:
        """Take no more transfers."""

    def in_flight(self) -> int:
        """Count the transfers that have not ended."""


class Runner:
    """Runs the transfers that it was dealt, in order. Its thread starts with the first one and ends with the path.

    Args:
        host: the path whose transfers it runs.
        urgent: whether it runs the transfers of high priority.

    Attributes:
        host: as given.
        queue: its transfers that have not ended, in the order of their submits, cancelled ones included.
        wake: gets an entry whenever something that it waits for may have happened.
        waiting_since: when its wait for a transfer's ``after=`` or conflicts began; None while it does not wait.
        thread: its thread.
    """

    def __init__(self, host: Dealer, *, urgent: bool) -> None:
        self.host = host
        self._urgent = urgent
        self.queue: deque[HostTransfer] = deque()
        self.wake: Wake = SimpleQueue()
        self.waiting_since: float | None = None
        name = "kvplan-urgent" if urgent else "kvplan-host"
        what = "no thread runs the transfers of " + ("high priority" if urgent else "a CPU executor")
        self.thread = Worker(
            name, self._serve, what, host.inside, enter=partial(live.add, self), leave=partial(live.discard, self)
        )
        self._crew = Crew(host.threads - 1, host.inside)
        self._standby = Standby(host.inside)

    def busy(self) -> bool:
        """Whether it copies a transfer, or will as soon as its thread runs."""
        self.host.deal_out()
        return bool(self.queue) and self.waiting_since is None

    def _serve(self) -> None:
        host = self.host
        if not self._urgent:
            host.load()
        while (transfer := self._next()) is not None:
            self._serve_one(transfer)
            self.queue.popleft()
            del transfer  # otherwise the last transfer's memory would stay alive until the next one comes
            host.tally.settle()
            if self._urgent:
                host.stir()
        self._standby.dismiss()
        self._crew.dismiss()

    def _next(self) -> HostTransfer | None:
        """Wait for the next transfer; None if no more can come."""
        host = self.host
        while True:
            for _ in range(self.wake.qsize()):  # what these entries report is checked now
                self.wake.get()
            host.look()
            host.deal_out()
            last = host.dealt_out()  # before the queue is read: the other runner deals out, too
            if self.queue:
                return self.queue[0]
            if last:
                return None
            self.wake.get()

    def _serve_one(self, transfer: HostTransfer) -> None:
        """Run a transfer in its turn, unless it is cancelled before."""
        error: BaseException | None = None
        if transfer.after is not None or transfer.behind:
            error = self._wait(transfer)
        if not self._urgent:
            self._let_pass(transfer)
        began = transfer.begin()
        transfer.after, transfer.behind = None, ()
        if began:
            self.host.run(transfer, self._crew, error)

    def _let_pass(self, transfer: HostTransfer) -> None:
        """Let urgent transfers go first: while one is copied, no other transfer begins."""
        urgent = self.host.urgent
        while urgent.busy() and not transfer.cancelled:
            self.wake.get()

    def _wait(self, transfer: HostTransfer) -> BaseException | None:
        """Wait for what comes before a transfer; return the error of its ``after=``, or None."""
        if transfer.cancelled:
            return None
        self.waiting_since = time.monotonic()
        self.host.stir()
        try:
            for other in transfer.behind:  # whether they succeed or fail
                sleep(lambda other=other: other.done() or transfer.cancelled, other.sleepers, None, self.wake)  # type: ignore[misc]
            return wait_on_cpu(transfer.after, self._standby, self.wake, lambda: transfer.cancelled)
        finally:
            self.waiting_since = None
