"""Handles that the agent gives out: prepared descriptor lists, and transfers that kvplan moves."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from select import select
from time import perf_counter
from typing import Any, NamedTuple, Protocol

from kvplan.engines.nixl.descriptor_rows import Rows
from kvplan.engines.nixl.spans import Placed, Spans
from kvplan.errors import TransferError
from kvplan.execute.transfer import Transfer
from kvplan.plan.plan import Plan

RELEASE_SECONDS = 30.0  # that a release waits for bytes in flight
SPIN_SECONDS = 2e-4  # between two looks of a caller that polls without a pause
PAUSE_SECONDS = 5e-5  # that such a look waits
log = logging.getLogger("kvplan.engines.nixl")


class Neighbour(Protocol):
    """A peer whose memory this process has opened.

    Attributes:
        name: the peer's name.
        spans: the memory, and its place here.
        words: the memory and its transports in words, for the log.
    """

    name: str
    spans: Spans
    words: str

    def submit(self, plan: Plan) -> Transfer:
        """Begin to move a plan between this process's memory and the peer's.

        Raises:
            KVPlanError: no byte has moved and none will.
        """

    def prepare(self, plan: Plan) -> None:
        """Warm up for plans like this one; move nothing."""

    def gone(self) -> str | None:
        """Return why the peer can no longer be moved to and from, or None."""

    def close(self) -> None:
        """Let go of the memory, once no transfer is in flight."""


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
        neighbour: the peer, if kvplan has opened its memory.
        placed: the rows in this process, or None.
        version: version of the registered memory that the rows were looked up in.
    """

    own: Any
    peer: str
    neighbour: Neighbour | None = None
    rows: Rows | None = None
    placed: Placed | None = None
    version: int = 0

    def release(self) -> None:
        """Give the list back to NIXL: now, or with the last transfer that may still be passed on to NIXL.

        NIXL's handle is released when the last reference to it is dropped, and such transfers hold one.
        """
        self.own = self.rows = self.placed = self.neighbour = None

    def __getattr__(self, name: str) -> Any:
        if name == "own":  # a copy that is not filled yet
            raise AttributeError(name)
        return getattr(self.own, name)  # _handle, _agent


class Bindings(Protocol):
    """The methods of an agent that its transfers call."""

    def error(self, kind: str, why: str) -> Exception:
        """Return NIXL's exception of a kind, such as ``"RemoteDisconnect"``."""

    def notify(self, peer: str, note: bytes) -> None:
        """Send a notification to a peer."""

    def post(self, handle: Any, note: bytes) -> str:
        """Post a transfer of NIXL; return its state."""

    def removals(self, peer: str) -> int:
        """Return how often a peer was removed."""

    def lost(self, neighbour: Neighbour, why: str) -> None:
        """Leave all later transfers with a peer to NIXL."""

    def knows(self, neighbour: Neighbour) -> bool:
        """Return whether a peer has been neither removed nor added again since."""


@dataclass(eq=False)
class TakenTransfer:
    """A transfer that kvplan moves, with the states of one of NIXL.

    Its notification goes to the peer when the caller has seen the end, after the last byte, as NIXL's does.

    Attributes:
        agent: the agent.
        neighbour: the peer.
        peer: name of the peer.
        plan: the bytes to move.
        count: number of descriptors.
        note: notification for the peer; empty for none.
        pass_on: makes the transfer by NIXL, if kvplan cannot move it.
        removals: how often the peer had been removed when the transfer was made.
    """

    agent: Bindings
    neighbour: Neighbour
    peer: str
    plan: Plan
    count: int
    note: bytes
    pass_on: Callable[[bytes], Any]
    removals: int = 0
    own: Any = None  # NIXL's handle, once the transfer has been passed on
    telemetry: Telemetry | None = None
    _moving: Transfer | None = None
    _failed: Exception | None = None
    _begun: float = 0.0
    _asked: float = 0.0
    _posted: float = 0.0
    _released: bool = False
    _looking: Any = field(default_factory=threading.RLock, repr=False)
    _busy: bool = False  # a signal handler may ask within a call of the same thread, which is half done

    def post(self, note: bytes) -> str:
        """Begin to move; see ``nixl_agent.transfer``. A transfer that has ended or failed can be posted again."""
        with self._looking:
            if self._busy:
                raise self.agent.error("RepostActive", "the transfer is being posted, or looked at")
            try:
                self._busy = True
                return self._post(note)
            finally:
                self._busy = False

    def _post(self, note: bytes) -> str:
        if self._released:
            raise self.agent.error("InvalidParam", "the transfer was released")
        if self._moving is not None and self.telemetry is None and self._failed is None and self._look() == "PROC":
            raise self.agent.error("RepostActive", "the transfer is in flight")
        if self.agent.removals(self.peer) != self.removals:
            raise self.agent.error("NotFound", f"peer {self.peer!r} was removed since the transfer was made")
        if self.own is not None:
            return self.agent.post(self.own, note)
        self.note = note or self.note
        self._failed = self.telemetry = self._moving = None
        self._begun = perf_counter()
        if not self.agent.knows(self.neighbour):
            return self._pass_on()
        try:
            self._moving = self.neighbour.submit(self.plan)
        except Exception as error:  # noqa: BLE001  # NIXL can still move it
            if gone := self.neighbour.gone():
                self.agent.lost(self.neighbour, gone)
            return self._pass_on(error, "" if gone else str(error))
        self._posted = perf_counter()
        # To look at a GPU's transfer of another process now would only wake the thread that ends it.
        return "PROC" if getattr(self._moving, "on_gpu", False) else self._look()

    def look(self) -> str:
        """Return ``"DONE"`` or ``"PROC"``; see ``nixl_agent.check_xfer_state``. At the end it notifies the peer.

        Raises:
            Exception: NIXL's, if the transfer was not posted, or has failed.
        """
        with self._looking:  # one thread sees the end, and notifies
            if self._busy:
                return "PROC"
            try:
                self._busy = True
                return self._look()
            finally:
                self._busy = False

    def _look(self) -> str:
        if self._failed is not None:
            raise self._failed
        if self.telemetry is not None:
            return "DONE"
        if self._moving is None:
            raise self.agent.error("NotPosted", "the transfer has not been posted")
        moving = self._moving
        if not self._ended(moving):
            return "PROC"
        try:
            moving.synchronize()
        except Exception as error:
            gone = self.neighbour.gone()
            begun = bool(getattr(moving, "begun", False))  # a peer may still change the destination
            if gone is None and not self._released and not begun:
                return self._pass_on(error, str(error))
            kind = "RemoteDisconnect" if gone else "Cancelled" if self._released else "Backend"
            self._failed = self.agent.error(kind, str(error))
            if gone:
                self.agent.lost(self.neighbour, gone)
            raise self._failed from error
        ended = perf_counter()
        if self.note:
            try:
                self.agent.notify(self.peer, self.note)
            except Exception as error:
                self._failed = error
                raise
        posted = self._posted
        start, post, whole = (
            int(seconds * 1e6) for seconds in (self._begun, posted - self._begun, ended - self._begun)
        )
        self.telemetry = Telemetry(start, post, whole, self.plan.nbytes, self.count)
        return "DONE"

    def _ended(self, moving: Transfer) -> bool:
        """Return whether a transfer has ended.

        A caller that asks again at once keeps the interpreter, for 5 ms at a time, from the threads that end transfers.
        So the second question of such a caller waits a little, unless the question itself can end the transfer.
        """
        now, before = perf_counter(), self._asked
        self._asked = now
        if moving.done():
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
            log.warning("NIXL moves a transfer with %s: %s: %s", self.peer, type(error).__name__, why)
        self._moving = None
        try:
            self.own = self.pass_on(self.note)
            return self.agent.post(self.own, b"")
        except Exception as refusal:
            self._failed = refusal
            raise refusal from error

    def release(self) -> None:
        """End the transfer: cancel it, or wait until its bytes have moved. The peer gets no notification then.

        Raises:
            Exception: NIXL's, if bytes are still moving after 30 seconds; the handle stays as it is.
        """
        with self._looking:
            released, self._released = self._released, True
        if released:
            return
        try:
            self._end()
        except BaseException:
            self._released = False
            raise
        self._moving = None
        self.pass_on = _released  # lets go of NIXL's lists

    def _end(self) -> None:
        if self.own is not None:
            self.own.release()
        elif (moving := self._moving) is not None and not moving.done() and not moving.cancel():
            with suppress(TransferError):
                moving.synchronize(RELEASE_SECONDS)
            if not moving.done():
                raise self.agent.error("Backend", f"it is in flight after {RELEASE_SECONDS} seconds")


def _released(_: bytes) -> Any:
    raise TransferError("the transfer was released")
