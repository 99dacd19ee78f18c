"""The connection to a peer through NIXL, by both ways: packed, or with a descriptor for each piece: direct."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from kvplan.agents.by_nixl.nixl_end import DONE, MOVING, NixlEnd, NixlOffer, in_words, spans_of
from kvplan.agents.by_nixl.nixl_packed import PACKED_VERSION, NixlPacked
from kvplan.agents.packed.packed_transfer import PATIENCE, PackedTransfer
from kvplan.agents.peer_transfer import BOUND, Order, PeerTransfer, bound_of
from kvplan.errors import PathError, TransferError
from kvplan.execute.transfer import Transfer, TransferResult
from kvplan.plan.descriptors import nixl_lists
from kvplan.plan.plan import Plan

LOOK_SECONDS = 50e-6  # seconds between two polls of a transfer in flight

log = logging.getLogger("kvplan.agents")


class NixlTransfer(Transfer):
    """A direct transfer by NIXL: it is posted, polled, and given up late. NIXL moves it also if no thread polls.

    Only :meth:`done` and calls that wait notice that the bytes have moved, or that it has failed; the ``seconds`` of
    the result end there.

    Args:
        end: this process's end; the caller holds its lock.
        order: the arguments of the submit, a :class:`kvplan.agents.peer_transfer.Order`. NIXL sends the note.
    """

    _descriptors = 0
    _handle: Any = None  # NIXL's
    _state = MOVING  # or DONE, or why it failed

    def __init__(self, end: NixlEnd, order: Order) -> None:
        self.plan = order.plan
        self._end, self._until, self._deadline = end, order.until, order.deadline
        self._posted = time.perf_counter()
        self._ask(lambda: self._post(order))

    def _post(self, order: Order) -> str:
        nixl = self._end.nixl
        if not self.plan.nbytes:
            if order.note:
                nixl.send_notif(order.peer, order.note)
            return DONE
        src, dst = nixl_lists(self.plan.descriptors(), self.plan.layouts)
        mine, theirs = (dst, src) if order.reading else (src, dst)
        self._descriptors = mine.descriptors
        here, there = nixl.get_xfer_descs(*mine), nixl.get_xfer_descs(*theirs)
        # One handle: lists that NIXL prepares for later transfers would be two more, and take as long to make.
        operation = "READ" if order.reading else "WRITE"
        self._handle = nixl.initialize_xfer(operation, here, there, order.peer, order.note)
        return str(nixl.transfer(self._handle))

    def done(self) -> bool:
        """See :meth:`Transfer.done`."""
        with self._end.lock:
            if self._state == MOVING:
                self._ask(lambda: self._end.nixl.check_xfer_state(self._handle))
            if self._until is not None and time.monotonic() > self._until:
                self.end(f"it did not end within its deadline of {self._deadline} seconds")
            return self._state != MOVING

    def synchronize(self, timeout: float | None = None) -> None:
        """See :meth:`Transfer.synchronize`."""
        started = time.monotonic()
        while not self.done():
            if timeout is not None and time.monotonic() - started > timeout:
                raise self._late(timeout)
            time.sleep(LOOK_SECONDS)
        if self._state != DONE:
            raise TransferError(f"{self._state}; if the peer is gone, meet() its new card and plan again")

    def end(self, state: str) -> None:
        """End it, unless it has ended: as done, or for a reason; the caller holds the lock."""
        if self._state == MOVING != state:
            self._state = state
            if state == DONE:
                seconds = time.perf_counter() - self._posted
                self._result = TransferResult(self.plan.nbytes, seconds, "nixl", self._descriptors, 1)
            if self._handle is not None:
                self._end.release(self._handle, memory=self.plan)

    def _ask(self, call: Callable[[], str]) -> None:
        try:
            state = call()
        except Exception as error:  # any error of NIXL is the transfer's
            self.end(in_words(error))
        else:
            self.end(state if state in (MOVING, DONE) else f"NIXL reports the state {state}")


class NixlLink:
    """The connection to a peer through NIXL.

    Args:
        end: this process's end of NIXL.
        name: name of the peer.
        offer: NIXL's part of the peer's card.
        packed: this process's packed way, or None.

    Attributes:
        own: this process's end of NIXL.
        why: why no transfer is accepted any more; None while it is open.

    Raises:
        KVPlanError: NIXL cannot be used.
        TransferError: NIXL does not accept the metadata of the card.
    """

    why: str | None = None

    def __init__(self, end: NixlEnd, name: str, offer: NixlOffer, packed: NixlPacked | None = None) -> None:
        self.own, self._name, self._packed, self._offer = end.open(), name, packed, offer
        self._flying: dict[int, PeerTransfer] = {}
        restarted = end.meet(name, offer.metadata)
        if packed is not None:
            if restarted:
                packed.part(name, "it has restarted", over=True)
            packed.met(name)

    # ---- packed ------------------------------------------------------------------------------------------------------

    def why_not_packed(self, plan: Plan, *, reading: bool) -> str | None:
        """Return why a plan cannot be packed, or None."""
        if self._packed is None:
            return "this agent packs nothing: it was made with a nixl_agent of the caller's, and without progress="
        if not self._offer.packed:
            return f"the card of {self._name!r} offers no packed transfers"
        if self._offer.packed != PACKED_VERSION:
            return f"{self._name!r} packs by version {self._offer.packed}, and this kvplan by {PACKED_VERSION}"
        return self._packed.why_not(self._name, plan, reading=reading)

    def way_of(self, plan: Plan, *, reading: bool) -> tuple[str, str]:
        """Return the faster way of a plan, ``"direct"`` or ``"packed"``, and the reason."""
        why = self.why_not_packed(plan, reading=reading)
        if why is not None or self._packed is None:
            return "direct", str(why)
        choice = self._packed.choose(plan, reading=reading)
        log.debug("%r goes %s: %s", plan, choice.way, choice.why)
        return choice.way, choice.why

    def direct_at_once(self, plan: Plan, *, reading: bool) -> bool:
        """Return whether it is known without :meth:`way_of` that a small plan goes direct."""
        return self._packed is not None and self._packed.direct_at_once(plan, reading=reading)

    def pack(self, order: Order, *, by_layer: bool, priority: str) -> PackedTransfer:
        """Begin a packed transfer; its note goes with it."""
        self._check_open()
        assert self._packed is not None  # why_not_packed() says so
        return self._packed.end().submit(
            self._name, order.plan, reading=order.reading, note=order.note, after=order.after, until=order.until,
            patience=PATIENCE if order.deadline is BOUND else None, by_layer=by_layer, priority=priority,
        )  # fmt: skip

    # ---- a descriptor for each piece ---------------------------------------------------------------------------------

    def start(self, order: Order) -> NixlTransfer:
        """Post a transfer; NIXL sends its note.

        Raises:
            PathError: this process's side is not registered.
        """
        own = self.own
        if not spans_of(pair[order.reading] for pair in order.plan.layouts) <= own.spans:
            side = "dst" if order.reading else "src"
            raise PathError(
                f"{side} of {order.plan!r} is neither a layout that {own.name!r} registered nor a part of one; "
                "compile with agent.layouts on this side"
            )
        if order.deadline is BOUND:
            seconds = bound_of(order.plan)
            order = order._replace(deadline=seconds, until=time.monotonic() + seconds)
        with own.calling("moves nothing"):
            self._check_open()
            return NixlTransfer(own, order)

    def _check_open(self) -> None:
        if self.why is not None:
            raise TransferError(f"no transfer with {self._name!r}: {self.why}; meet it again, by a new card")

    # ---- see kvplan.agents.peer_transfer.Peering ---------------------------------------------------------------------

    def enter(self, transfer: PeerTransfer) -> None:
        """Count a transfer as in flight; raise TransferError if the connection is not open."""
        self._check_open()
        self._flying[id(transfer)] = transfer

    def leave_flight(self, transfer: PeerTransfer) -> None:
        """Count a transfer as ended."""
        self._flying.pop(id(transfer), None)

    @property
    def in_flight(self) -> int:
        """Number of transfers in flight."""
        return len(self._flying)

    def lost(self) -> str | None:
        """Return None: NIXL itself reports a peer that is gone."""
        return None

    def send_note(self, note: bytes) -> None:
        """Send a note by itself."""
        if self.why is not None:
            raise TransferError(f"no note to {self._name!r}: {self.why}")
        self.own.tell(self._name, note)

    def leave(self) -> None:
        """Remove the peer from NIXL; transfers that have not ended fail."""
        if self.why is None:
            self.why = "the peer was forgotten, or this agent was closed"
            flying = list(self._flying.values())
            for transfer in flying:
                transfer.cancel()
            if self._packed is not None:
                self._packed.part(self._name, self.why)
            with self.own.lock:
                for transfer in flying:
                    if isinstance(transfer.inner, NixlTransfer):
                        transfer.inner.end(self.why)
                self.own.drop(self._name)
