"""The transport ``nixl``: an agent of NIXL, made when it is first needed, and the connection to a peer through it."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from kvplan.agents.peer_transfer import Order
from kvplan.base.quoting import quoted
from kvplan.errors import KVPlanError, LayoutError, PathError, TransferError
from kvplan.execute.transfer import Transfer
from kvplan.layout.kvlayout import KVLayout
from kvplan.nixl.nixl_agent import NixlAgent
from kvplan.nixl.nixl_peer import NixlPeer


class NixlEnd:
    """This process's agent of NIXL. It is made with the first card, or when the first peer is met through it.

    Args:
        name: name of the agent.
        layouts: layouts to register.
        agent: an existing ``nixl_agent``, or None.
        backends: names of NIXL's backends.

    Attributes:
        refused: why NIXL cannot be used; None while that is not known.
    """

    def __init__(self, name: str, layouts: Mapping[str, KVLayout], agent: Any, backends: Sequence[str]) -> None:
        self.refused: str | None = None
        self._name, self._layouts, self._agent, self._backends = name, dict(layouts), agent, tuple(backends)
        self._lock = threading.RLock()
        self._made: NixlAgent | None = None

    @property
    def made(self) -> NixlAgent | None:
        """The agent of NIXL, if it was made."""
        return self._made

    def agent(self) -> NixlAgent:
        """Return the agent of NIXL; raise PathError if it cannot be made."""
        with self._lock:
            if self.refused is not None:
                raise PathError(self.refused)
            if self._made is None:
                try:
                    self._made = NixlAgent(self._name, self._layouts, backends=self._backends, agent=self._agent)
                except KVPlanError as error:
                    self.refused = str(error)
                    raise PathError(self.refused) from error
            return self._made

    def metadata(self) -> bytes | None:
        """Return NIXL's metadata for the card, or None if NIXL cannot be used."""
        try:
            return self.agent().metadata()
        except KVPlanError as error:
            self.refused = self.refused or str(error)
            return None

    def notes(self) -> list[tuple[str, bytes]]:
        """Return the notes that came through NIXL."""
        return [] if self._made is None else self._made.notes()

    def close(self) -> None:
        """Close the agent of NIXL, if it was made."""
        with self._lock:
            made, self._made = self._made, None
            if made is not None:
                made.close()


def checked_metadata(part: object) -> bytes:
    """Return NIXL's metadata from a card; raise LayoutError if it is wrong."""
    value = part.get("metadata") if isinstance(part, dict) and len(part) == 1 else None
    try:
        return bytes.fromhex(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise LayoutError(f"the card's nixl is {quoted(part)}; it has 'metadata' in hexadecimal digits") from None


class NixlLink:
    """The connection to a peer through NIXL.

    Attributes:
        why: why no transfer is accepted any more; None while it is open.
    """

    def __init__(self, end: NixlEnd, name: str, layouts: Mapping[str, KVLayout], metadata: bytes) -> None:
        self.why: str | None = None
        self._agent = end.agent()
        self._peer: NixlPeer = self._agent.connect(name, layouts, metadata)
        self._flying: dict[int, Any] = {}

    def start(self, order: Order) -> Transfer:
        """Post a transfer; NIXL sends its note."""
        left = None if order.until is None else max(order.until - time.monotonic(), 1e-3)
        return self._peer.submit(order.plan, note=order.note, attempts=order.attempts, deadline=left)

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

    def lost(self, opened: Any) -> str | None:
        """Return None: NIXL itself reports a peer that is gone."""
        del opened
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
            self._agent.forget(self._peer)
