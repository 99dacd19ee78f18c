"""The thread that runs the host path's transfers of one priority, one after another."""

from __future__ import annotations

import time
from collections import deque
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING

from kvplan.base.latch import Wake, sleep
from kvplan.execute.host.crew import Crew
from kvplan.execute.threads import Standby, Worker

if TYPE_CHECKING:
    from kvplan.execute.host.path import HostPath
    from kvplan.execute.transfer import HostTransfer

live: set[Runner] = set()  # those whose thread may still have something to do; an exit waits for it


class Runner:
    """Takes what was dealt out to it, in order; its thread is started with the first transfer, and ends with the path.

    Args:
        host: whose transfers it runs.
        urgent: whether it runs those of high priority.

    Attributes:
        host: the same.
        queue: transfers dealt out to it that have not ended, in the order of their submits; cancelled ones among them.
        wake: gets an entry whenever something that it waits for may have happened.
        waiting_since: when the wait began for what comes before its transfer; None while it does not wait so.
        thread: its thread.
    """

    def __init__(self, host: HostPath, *, urgent: bool) -> None:
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
        """Whether something is copied, or will be as soon as its thread comes to it."""
        self.host.deal_out()
        return bool(self.queue) and self.waiting_since is None

    def _serve(self) -> None:
        host = self.host
        if not self._urgent:
            host.load()
        while (transfer := self._next()) is not None:
            self._serve_one(transfer)
            self.queue.popleft()
            del transfer  # else the last transfer's memory would live until the next one comes
            host.tally.settle()
            if self._urgent:
                host.stir()
        self._standby.dismiss()
        self._crew.dismiss()

    def _next(self) -> HostTransfer | None:
        """The transfer whose turn it is; None where there will be no more."""
        host = self.host
        while True:
            for _ in range(self.wake.qsize()):  # what they tell is looked at now
                self.wake.get()
            host.look()
            host.deal_out()
            last = host.dealt_out()  # asked first: the other runner deals out, too
            if self.queue:
                return self.queue[0]
            if last:
                return None
            self.wake.get()

    def _serve_one(self, transfer: HostTransfer) -> None:
        """Run a transfer in its turn, unless it is taken back before."""
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
        """Urgent transfers go first, and while one of them is copied, nothing else begins."""
        urgent = self.host.urgent
        while urgent.busy() and not transfer.cancelled:
            self.wake.get()

    def _wait(self, transfer: HostTransfer) -> BaseException | None:
        """Wait for what comes before a transfer; what went wrong with that."""
        if transfer.cancelled:
            return None
        self.waiting_since = time.monotonic()
        self.host.stir()
        try:
            for other in transfer.behind:  # however it ends
                sleep(lambda other=other: other.done() or transfer.cancelled, other.sleepers, None, self.wake)  # type: ignore[misc]
            return self._standby.wait(transfer.after, self.wake, lambda: transfer.cancelled)
        finally:
            self.waiting_since = None
