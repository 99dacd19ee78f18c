"""What the agent gives out: prepared descriptor lists, and transfers that kvplan moves."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from select import select
from time import perf_counter
from typing import Any, NamedTuple

from kvplan.engines.nixl.descriptor_rows import Placed, Rows
from kvplan.engines.nixl.local_peers import RELEASE_SECONDS, LocalPeer
from kvplan.engines.nixl.packed_peers import PackedPeer
from kvplan.errors import TransferError
from kvplan.execute.transfer import Transfer
from kvplan.plan.plan import Plan

SPIN_SECONDS = 2e-4  # between two looks of a caller that polls without a pause
PAUSE_SECONDS = 5e-5  # that such a look waits
log = logging.getLogger("kvplan.engines.nixl")


class Telemetry(NamedTuple):
    """Figures of a finished transfer, with the names of ``nixlXferTelemetry``.

    Attributes:
        startTime: microseconds of a steady clock at the post.
        postDuration, xferDuration: microseconds from the post to its return, and to the end of the transfer.
        totalBytes: bytes moved.
        descCount: descriptors moved.
    """

    startTime: int  # noqa: N815  # NIXL's names
    postDuration: int  # noqa: N815
    xferDuration: int  # noqa: N815
    totalBytes: int  # noqa: N815
    descCount: int  # noqa: N815


@dataclass(eq=False)
class PreparedList:
    """A prepared descriptor list: NIXL's own handle, and the rows if kvplan can move them.

    Attributes:
        own: NIXL's handle; None once the list was released.
        peer: name of the peer whose memory it is; "" for this process's memory.
        rows: the rows as they were given, or None.
        neighbour: the peer, if kvplan moves to it.
        placed: the rows in this process, or None.
        among: the registered memory in which the rows were looked up.
    """

    own: Any
    peer: str
    rows: Rows | None = None
    neighbour: LocalPeer | PackedPeer | None = None
    placed: Placed | None = None
    among: object = None

    def release(self) -> None:
        """Give the list back to NIXL: now, or with the last transfer that may still be passed on to NIXL.

        NIXL's handle is released when the last reference to it is dropped, and such transfers hold one.
        """
        self.own = self.rows = self.placed = self.neighbour = None

    def __getattr__(self, name: str) -> Any:
        if name == "own":  # a copy that is not filled yet
            raise AttributeError(name)
        return getattr(self.own, name)  # _handle, _agent


@dataclass(eq=False)
class TakenTransfer:
    """A transfer that kvplan moves, with the states of one of NIXL.

    Its notification goes to the peer when the caller has seen the end, after the last byte, as NIXL's does.

    Attributes:
        real: NIXL's agent.
        lost: lets NIXL move all later transfers with a neighbour, for a reason.
        neighbour: the peer.
        plan: the bytes to move.
        note: notification for the peer; empty for none.
        pass_on: makes the transfer by NIXL, of a notification, if kvplan cannot move it.
        own: NIXL's handle, once the transfer has been passed on.
        telemetry: its figures, once it has ended.
    """

    real: Any
    lost: Callable[[Any, str], None]
    neighbour: LocalPeer | PackedPeer
    plan: Plan
    note: bytes
    pass_on: Callable[[bytes], Any]
    own: Any = None
    telemetry: Telemetry | None = None
    _moving: Transfer | None = None
    _failed: Exception | None = None
    _begun: float = 0.0
    _posted: float = 0.0
    _asked: float = 0.0
    _released: bool = False
    _lock: Any = field(default_factory=threading.Lock, repr=False)  # one thread sees the end, and notifies

    def post(self, note: bytes) -> str:
        """Begin to move; see ``nixl_agent.transfer``. A transfer that has ended or failed can be posted again."""
        with self._lock:
            if self._released:
                raise nixl_error(self.real, "InvalidParam", "the transfer was released")
            if self._moving is not None and self._failed is None and self.telemetry is None:
                raise nixl_error(self.real, "RepostActive", "the transfer is in flight")
            if self.neighbour.removed:
                raise nixl_error(self.real, "NotFound", f"peer {self.neighbour.name!r} was removed since it was made")
            if self.own is not None:
                return str(self.real.transfer(self.own, note))
            self.note = note or self.note
            self._failed = self.telemetry = self._moving = None
            self._begun = perf_counter()
            if self.neighbour.left:
                return self._pass_on()
            try:
                self._moving = self.neighbour.submit(self.plan)
            except Exception as error:  # noqa: BLE001  # NIXL can still move it
                if gone := self.neighbour.gone():
                    self.lost(self.neighbour, gone)
                return self._pass_on(error, "" if gone else str(error))
            self._posted = perf_counter()
            # To look at a GPU's transfer of another process now would only wake the thread that ends it.
            return "PROC" if getattr(self._moving, "on_gpu", False) else self._look()

    def look(self) -> str:
        """Return ``"DONE"`` or ``"PROC"``; see ``nixl_agent.check_xfer_state``. At the end it notifies the peer.

        Raises:
            Exception: NIXL's, if the transfer was not posted, or has failed.
        """
        if not self._lock.acquire(blocking=False):
            return "PROC"
        try:
            return self._look()
        finally:
            self._lock.release()

    def _look(self) -> str:
        if self._failed is not None:
            raise self._failed
        if self.telemetry is not None:
            return "DONE"
        moving = self._moving
        if moving is None:
            raise nixl_error(self.real, "NotPosted", "the transfer has not been posted")
        if not self._ended(moving):
            return "PROC"
        try:
            moving.synchronize()
        except Exception as error:
            gone = self.neighbour.gone()
            if gone is None and not getattr(moving, "begun", False):
                return self._pass_on(error, str(error))
            self._failed = nixl_error(self.real, "RemoteDisconnect" if gone else "Backend", str(error))
            if gone:
                self.lost(self.neighbour, gone)
            raise self._failed from error
        start, post, whole = (
            int(seconds * 1e6) for seconds in (self._begun, self._posted - self._begun, perf_counter() - self._begun)
        )
        if self.note:
            try:
                self.real.send_notif(self.neighbour.name, self.note)
            except Exception as error:
                self._failed = error
                raise
        self.telemetry = Telemetry(start, post, whole, self.plan.nbytes, self.plan.units)
        return "DONE"

    def _ended(self, moving: Transfer) -> bool:
        """Return whether a transfer has ended.

        A caller that asks again at once keeps the interpreter, for 5 ms at a time, from the threads that end transfers.
        So the second question of such a caller waits a little, unless the question itself can end the transfer.
        """
        now, before = perf_counter(), self._asked
        self._asked = now
        if self.neighbour.ended(moving):
            return True
        if getattr(moving, "quiet", False):  # the question itself ends it
            select((), (), (), 0)  # lets other threads have the interpreter; a sleep of no time takes 70 us
            return False
        if now - before > SPIN_SECONDS:
            return False
        with suppress(TransferError):  # a failure is raised by the caller of this method
            moving.synchronize(PAUSE_SECONDS)
        self._asked = perf_counter()
        return moving.done()

    def _pass_on(self, error: Exception | None = None, why: str = "") -> str:
        """Let NIXL make and post the transfer, because the peer is no longer open here, or kvplan has failed."""
        if why:
            log.warning("NIXL moves a transfer with %s: %s: %s", self.neighbour.name, type(error).__name__, why)
        self._moving = None
        try:
            self.own = self.pass_on(self.note)
            return str(self.real.transfer(self.own, b""))
        except Exception as refusal:
            self._failed = refusal
            raise refusal from error

    def release(self) -> None:
        """End the transfer: cancel it, or wait until its bytes have moved. The peer gets no notification then.

        Raises:
            Exception: NIXL's, if bytes are still moving after 30 seconds; the handle stays as it is.
        """
        with self._lock:
            if self._released:
                return
            if self.own is not None:
                self.own.release()
            elif (moving := self._moving) is not None and not moving.done() and not self.neighbour.end(moving):
                raise nixl_error(self.real, "Backend", f"it is in flight after {RELEASE_SECONDS} seconds")
            self._released, self._moving = True, None
            self.pass_on = _released  # lets go of NIXL's lists


def nixl_error(real: Any, kind: str, why: str) -> Exception:
    """Return NIXL's exception of a kind, with NIXL's text in front; TransferError if this NIXL has none."""
    module = sys.modules.get(type(real).__module__)
    made = getattr(getattr(module, "nixlBind", module), f"nixl{kind}Error", TransferError)
    words = "".join(f"_{letter}" if letter.isupper() else letter for letter in kind).upper()
    error: Exception = made(f"NIXL_ERR{words}: {why}")
    return error


def bytes_of(note: Any) -> bytes:
    """Return a notification as bytes; raise TypeError if it is neither a text nor bytes, as NIXL does."""
    return note.encode() if isinstance(note, str) else bytes(memoryview(note))


def _released(_: bytes) -> Any:
    raise TransferError("the transfer was released")
