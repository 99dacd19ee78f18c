"""The end of a transfer between processes: the bytes have moved, the peer lives, the note is sent; or an error."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

from kvplan.agents.latched_transfer import LatchedTransfer
from kvplan.agents.way import Deliver, delivered
from kvplan.base.threads import error_of
from kvplan.errors import TransferError
from kvplan.execute.stats import Tally
from kvplan.execute.transfer import Transfer, TransferResult, cancellation
from kvplan.nixl.nixl_transfer import NixlTransfer
from kvplan.plan.plan import Plan

_HOLDS = {
    True: "the destination's blocks hold bytes that may be wrong: do not use them",
    False: "the bytes were written to the memory of a peer that is gone",
}  # by whether it reads from the peer

# The deadline of a submit that names none, compared by identity: packed transfers have a bound since they could have
# begun, and the others none.
BOUND = 30.0

log = logging.getLogger("kvplan.agents")


def _ended() -> Transfer:
    raise TransferError("the transfer has ended")


class Peering(Protocol):
    """The methods of a peer's connection that a transfer calls; :class:`kvplan.agents.link.Link` has them."""

    why: str | None

    def enter(self, transfer: Any) -> None:
        """Count the transfer as in flight; raise TransferError if the connection is not open."""

    def leave_flight(self, transfer: Any) -> None:
        """Count the transfer as ended."""

    def lost(self, opened: Any) -> str | None:
        """Return why bytes that have just moved are nobody's word, or None."""

    def send_note(self, note: bytes) -> None:
        """Send the note."""


class Order(NamedTuple):
    """The arguments of a submit.

    Attributes:
        plan: the plan.
        peer: name of the peer.
        reading: whether it reads from the peer; otherwise it writes.
        note: note for the peer; ``b""`` if the transport delivers it, or if there is none.
        attempts: number of attempts in total.
        deadline: seconds until it is given up, or None.
        until: when that is, as ``time.monotonic`` counts, or None.
        after: what the lane waits for before the first attempt, or None.
    """

    plan: Plan
    peer: str
    reading: bool
    note: bytes = b""
    attempts: int = 1
    deadline: float | None = None
    until: float | None = None
    after: Any = None


class PeerEnding(LatchedTransfer):
    """The end of a :class:`kvplan.agents.peer_transfer.PeerTransfer`.

    Args:
        order: the arguments of the submit.
        link: the peer's connection.
        opened: the peer's opened memory, which delivers notes; or None.
        tally: sums over the transfers with the peer.
        start: submits the inner transfer.
    """

    # Defaults that most transfers keep, so that a submit need not set them.
    attempt = 0
    _deferred = _refused = _cancelled = _expired = False

    def __init__(self, order: Order, link: Peering, opened: Any, tally: Tally, start: Callable[[], Transfer]) -> None:
        super().__init__(order.plan)
        self._inners: list[Transfer] = []  # of each attempt
        self.until = order.until
        self._order, self._link, self._opened, self._tally, self._start = order, link, opened, tally, start
        self._taken: list[Deliver] = []  # the transport's function, if the transport delivers the note

    @property
    def inner(self) -> Transfer | None:
        """The transfer that moves the bytes; None while it has not been submitted."""
        inners = self._inners
        return inners[-1] if inners else None

    @abstractmethod
    def submit(self) -> None:
        """Submit the inner transfer, in the caller's thread."""

    def settle(self) -> bool:
        """End it, now that the inner transfer has ended; return False if it was submitted again."""
        result, error = None, None
        if self.inner is None and (self._refused or not self._deferred) and not self._over.happened:
            self._link.leave_flight(self)
            self._ends.append((None, TransferError("the submit was refused or interrupted; nothing was moved")))
            self._over.set()
            return True
        if not self._over.happened:
            inner = self.inner
            problem = None if inner is None else error_of(inner.synchronize)
            if problem is not None and inner is not None and inner.cancel():
                self._cancelled = True  # cancel() of this transfer may be in another thread, and not have returned yet
            if inner is None or (problem is not None and self._cancelled):
                error = self._cancellation()
            elif problem is None:
                error = self._settle_moved()
                result = inner.result() if error is None else None
            else:
                if self.attempt < self._order.attempts and self._link.why is None:
                    log.warning("%s with %s failed (%s); it is tried again", self.plan, self._order.peer, problem)
                    problem = error_of(self.submit)
                    if problem is None:
                        return False
                error = self._problem(str(problem), f"{self._destination()} may hold a part of the bytes")
        self._link.leave_flight(self)
        self._finish(result, error)
        return True

    def _end_here(self) -> bool:
        """End it in the caller's thread, if its bytes have moved and nothing is wrong; return whether it has ended.

        The lane's thread does the same, perhaps at the same time. A signal handler may interrupt this call at any
        point, and then the lane's thread completes the end.
        """
        result = None if self._cancelled else self._result_here(self._inners[-1])
        if result is None:
            return self._over.happened
        if self._link.lost(self._opened) is not None:
            return self._over.happened
        self._link.leave_flight(self)
        self._finish(result, None)
        return True

    def _result_here(self, inner: Transfer) -> TransferResult | None:
        """Return the result of the inner transfer if its bytes have moved; None if not, or something is wrong."""
        if isinstance(inner, NixlTransfer):
            return inner.moved()
        try:
            return inner.result() if inner.done() else None
        except TransferError:
            return None

    def _settle_moved(self) -> TransferError | None:
        """Ask whether the peer lives, then send the note; return the error, or None."""
        order = self._order
        lost = self._link.lost(self._opened)
        if lost is not None:
            return self._problem(lost, _HOLDS[order.reading])
        if isinstance(order.after, PeerEnding):  # a GPU waited for its bytes only, and not for whether its peer lived
            failed = error_of(order.after.synchronize)
            if failed is not None:
                return self._problem(f"its after= failed ({failed})", f"{self._destination()} may hold wrong bytes")
        if self._taken or order.note:
            try:
                if self._taken:
                    self._tell(None)
                else:
                    self._link.send_note(order.note)
            except TransferError as error:
                return self._problem(f"the note was not sent: {error}", "all bytes have moved")
        return None

    def _finish(self, result: TransferResult | None, error: TransferError | None) -> None:
        mine = result, error
        self._ends.append(mine)
        if self._ends[0] is mine:  # the first one counts
            if error is not None and self._taken:
                with suppress(TransferError):  # the peer is gone
                    self._tell(error)
            if result is not None:
                self._tally.add(result, "read" if self._order.reading else "write")
            elif self._cancelled and not self._expired:
                self._tally.cancel()
            else:
                self._tally.fail(self.plan, "agent", error)
        self._over.set()
        if self._order.after is not None:
            self._order = self._order._replace(after=None)  # otherwise a chain of transfers would stay alive
        self._start = _ended

    def _tell(self, error: TransferError | None) -> None:
        """Call the transport's function, once."""
        deliver, self._taken[0] = self._taken[0], delivered
        deliver(error)

    def _cancellation(self) -> TransferError:
        if self._link.why is not None:
            return self._problem(self._link.why, "it had not begun, and nothing was moved")
        return TransferError(cancellation(self.plan))

    def _problem(self, what: str, held: str) -> TransferError:
        verb = "reading from" if self._order.reading else "writing to"
        tries = f" in {self.attempt} attempts" if self.attempt > 1 else ""
        return TransferError(f"{verb} {self._order.peer!r} failed{tries}: {what}; {held}")

    def _destination(self) -> str:
        return "the destination" if self._order.reading else "the peer's memory"
