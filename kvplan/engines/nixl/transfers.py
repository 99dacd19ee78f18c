"""What the agent gives out: prepared descriptor lists, and transfers that kvplan moves."""

from __future__ import annotations

import logging
import os
import sys
from contextlib import suppress
from dataclasses import dataclass
from time import perf_counter
from typing import Any, NamedTuple

from kvplan.engines.nixl.descriptor_rows import Placed
from kvplan.engines.nixl.neighbours import Neighbour
from kvplan.errors import TransferError
from kvplan.execute.transfer import Transfer
from kvplan.plan.plan import Plan

END_SECONDS = 30.0  # that a release waits for bytes in flight
REMOVED = "the engine has removed it"  # why NIXL moves all transfers with a peer
log = logging.getLogger("kvplan.engines.nixl")


class Telemetry(NamedTuple):
    """Figures of a finished transfer, with the names of ``nixlXferTelemetry``.

    Attributes:
        startTime: microseconds of a steady clock at the post.
        postDuration, xferDuration: microseconds from the post to its return, and to the end of the transfer.
        totalBytes: bytes moved.
        descCount: descriptors moved.
    """

    startTime: int  # NIXL's names
    postDuration: int
    xferDuration: int
    totalBytes: int
    descCount: int


@dataclass(eq=False)
class PreparedList:
    """A prepared descriptor list: NIXL's own handle, and the rows if kvplan can move them.

    Attributes:
        own: NIXL's handle; None once the list was released.
        placed: the rows in this process, or None.
        neighbour: for a peer's list, the way to the peer.
    """

    own: Any
    placed: Placed | None = None
    neighbour: Neighbour | None = None

    def release(self) -> None:
        """Give the list back to NIXL: now, or with the last transfer that may still be passed on to NIXL.

        NIXL's handle is released when the last reference to it is dropped, and such transfers hold one.
        """
        self.own = self.placed = self.neighbour = None


class TakenTransfer:
    """A transfer that kvplan moves, with the states of one of NIXL. One thread uses it at a time.

    Its notification goes to the peer when the caller has seen the end, after the last byte, as NIXL's does.

    Args:
        real: NIXL's agent.
        neighbour: the peer.
        plan: the bytes to move.
        note: notification for the peer; empty for none.
        by_nixl: makes the transfer by NIXL, of a notification, if kvplan cannot move it.

    Attributes:
        own: NIXL's handle, once the transfer has been passed on.
        telemetry: its figures, once it has ended.
    """

    own: Any = None
    telemetry: Telemetry | None = None
    _moving: Transfer | None = None
    _error: Exception | None = None
    _begun = _posted = 0.0

    def __init__(self, real: Any, neighbour: Neighbour, plan: Plan, note: bytes, by_nixl: Any) -> None:
        self._real, self._neighbour, self._plan, self._note = real, neighbour, plan, note
        self._by_nixl = by_nixl  # None once it is released

    def post(self, note: bytes) -> str:
        """Begin to move; see ``nixl_agent.transfer``. A transfer that has ended or failed can be posted again."""
        neighbour = self._neighbour
        if self._by_nixl is None:
            raise nixl_error(self._real, "InvalidParam", "the transfer was released")
        if self._moving is not None:
            raise nixl_error(self._real, "RepostActive", "the transfer is in flight")
        if neighbour.left == REMOVED:
            raise nixl_error(self._real, "NotFound", f"peer {neighbour.name!r} was removed since it was made")
        if self.own is not None:
            return str(self._real.transfer(self.own, note))
        self._note = note or self._note
        self._error = self.telemetry = None
        self._begun = perf_counter()
        if neighbour.left:
            return self._pass_on()
        try:
            self._moving = neighbour.submit(self._plan)
        except Exception as error:  # NIXL can still move it
            return self._pass_on(self._gone() or str(error))
        self._posted = perf_counter()
        return "PROC"

    def look(self) -> str:
        """Return ``"DONE"`` or ``"PROC"``; see ``nixl_agent.check_xfer_state``. At the end it notifies the peer.

        Raises:
            Exception: NIXL's, if the transfer was not posted, or has failed.
        """
        moving = self._moving
        if moving is not None and moving.done():
            return self._end(moving)
        if moving is not None:
            os.sched_yield()  # a caller that asks without a pause would keep the interpreter, for 5 ms at a time
            return "PROC"
        if self._error is not None:
            raise self._error
        if self.telemetry is None:
            raise nixl_error(self._real, "NotPosted", "the transfer has not been posted")
        return "DONE"

    def _end(self, moving: Transfer) -> str:
        self._moving = None
        try:
            moving.synchronize()
            start, post, whole = self._begun, self._posted - self._begun, perf_counter() - self._begun
            if self._note:
                self._real.send_notif(self._neighbour.name, self._note)
        except TransferError as error:
            gone = self._gone(moving)
            if gone is None and not getattr(moving, "begun", True):
                return self._pass_on(str(error))
            self._error = nixl_error(self._real, "RemoteDisconnect" if gone else "Backend", str(error))
        except Exception as error:  # of NIXL; see below
            self._error = error
        else:
            start, post, whole = (int(seconds * 1e6) for seconds in (start, post, whole))
            self.telemetry = Telemetry(start, post, whole, self._plan.nbytes, self._plan.units)
        return self.look()

    def _gone(self, moving: Transfer | None = None) -> str | None:
        """Return why the peer is gone, or None. A peer that is gone is left to NIXL from now on."""
        neighbour = self._neighbour
        gone = REMOVED if neighbour.left == REMOVED else neighbour.gone(moving)
        if gone is not None and neighbour.left is None:
            log.warning("transfers with %s go by NIXL from now on: %s", neighbour.name, gone)
            neighbour.leave(gone)
        return gone

    def _pass_on(self, why: str = "") -> str:
        """Let NIXL make and post the transfer, because the peer is no longer open here, or kvplan has failed."""
        if why:
            log.warning("NIXL moves a transfer with %s: %s", self._neighbour.name, why)
        self.own = self._by_nixl(self._note)
        return str(self._real.transfer(self.own, b""))

    def release(self) -> None:
        """End the transfer: cancel it, or wait until its bytes have moved. The peer gets no notification then.

        Raises:
            Exception: NIXL's, if bytes are still moving after 30 seconds; the handle stays as it is.
        """
        if self.own is not None:
            self.own.release()
        if (moving := self._moving) is not None:
            if not moving.cancel():
                self._neighbour.give_up(moving)
            with suppress(TransferError):
                moving.synchronize(END_SECONDS)
            if not moving.done():
                raise nixl_error(self._real, "Backend", f"it is in flight after {END_SECONDS} seconds")
        self._moving = self._by_nixl = None  # lets go of NIXL's lists


def nixl_error(real: Any, kind: str, why: str) -> Exception:
    """Return NIXL's exception of a kind, with NIXL's text in front; TransferError if this NIXL has none."""
    module = sys.modules.get(type(real).__module__)
    cls = getattr(getattr(module, "nixlBind", module), f"nixl{kind}Error", TransferError)
    words = "".join(f"_{letter}" if letter.isupper() else letter for letter in kind).upper()
    error: Exception = cls(f"NIXL_ERR{words}: {why}")
    return error


def bytes_of(note: Any) -> bytes:
    """Return a notification as bytes; raise TypeError if it is neither a text nor bytes, as NIXL does."""
    return note.encode() if isinstance(note, str) else bytes(memoryview(note))
