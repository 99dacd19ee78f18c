"""The connection to a peer through NIXL, by both ways: a descriptor for each piece, or packed."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

from kvplan.agents.by_nixl.nixl_end import NixlEnd, NixlOffer
from kvplan.agents.by_nixl.nixl_packed import PACKED_VERSION, NixlPacked
from kvplan.agents.packed.end import PATIENCE
from kvplan.agents.packed.packed_transfer import PackedTransfer
from kvplan.agents.peer_transfer import BOUND, Order, bound_of
from kvplan.errors import TransferError
from kvplan.execute.transfer import Transfer
from kvplan.layout.kvlayout import KVLayout
from kvplan.nixl.nixl_agent import NixlAgent
from kvplan.nixl.nixl_peer import NixlPeer
from kvplan.plan.plan import Plan

log = logging.getLogger("kvplan.agents")


class NixlLink:
    """The connection to a peer through NIXL.

    Args:
        end: this process's end of NIXL.
        name: name of the peer.
        layouts: the peer's layouts.
        offer: NIXL's part of the peer's card.
        packed: this process's packed way, or None.

    Attributes:
        why: why no transfer is accepted any more; None while it is open.
    """

    def __init__(
        self,
        end: NixlEnd,
        name: str,
        layouts: Mapping[str, KVLayout],
        offer: NixlOffer,
        packed: NixlPacked | None = None,
    ) -> None:
        self.why: str | None = None
        self._agent = end.agent()
        if packed is not None:
            packed.met(name, offer.metadata)
        self._peer: NixlPeer = self._agent.connect(name, layouts, offer.metadata)
        self._flying: dict[int, Any] = {}
        self._packed, self._offer = packed, offer
        if packed is not None:
            packed.start()

    @property
    def own(self) -> NixlAgent:
        """This process's agent of NIXL."""
        return self._agent

    def why_not_packed(self, plan: Plan, *, reading: bool) -> str | None:
        """Return why a plan cannot be packed, or None."""
        if self._packed is None:
            return "this agent packs nothing: it was made with a nixl_agent of the caller's, and without progress="
        if not self._offer.packed:
            return f"the card of {self._peer.name!r} offers no packed transfers"
        if self._offer.packed != PACKED_VERSION:
            return f"{self._peer.name!r} packs by version {self._offer.packed}, and this kvplan by {PACKED_VERSION}"
        return self._packed.why_not(self._peer.name, plan, reading=reading)

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
        if self._packed is None or self.why is not None:
            raise TransferError(f"no transfer with {self._peer.name!r}: {self.why}")
        return self._packed.end().submit(
            self._peer.name, order.plan, reading=order.reading, note=order.note, after=order.after, until=order.until,
            patience=PATIENCE if order.deadline is BOUND else None, by_layer=by_layer, priority=priority,
        )  # fmt: skip

    def start(self, order: Order) -> Transfer:
        """Post a transfer; NIXL sends its note."""
        left = None if order.until is None else max(order.until - time.monotonic(), 1e-3)
        if order.deadline is BOUND:
            left = bound_of(order.plan)
        return self._peer.post(order.plan, note=order.note, attempts=1, deadline=left)

    def enter(self, transfer: Any) -> None:
        """Count a transfer as in flight; raise TransferError if the connection is not open."""
        if self.why is not None:
            raise TransferError(f"no transfer with {self._peer.name!r}: {self.why}")
        self._flying[id(transfer)] = transfer

    def leave_flight(self, transfer: Any) -> None:
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
            raise TransferError(f"no note to {self._peer.name!r}: {self.why}")
        self._peer.connection.tell(note)

    def leave(self) -> None:
        """Remove the peer from NIXL; transfers that have not ended fail."""
        if self.why is None:
            self.why = "the peer was forgotten, or this agent was closed"
            for transfer in list(self._flying.values()):
                transfer.cancel()
            if self._packed is not None:
                self._packed.forget(self._peer.name)
            self._agent.forget(self._peer)
