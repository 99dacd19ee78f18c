"""NIXL as packed transfers reach peers: the metadata of the ring, wires, and what NIXL goes on knowing of a peer."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from kvplan.agents.by_nixl.nixl_end import NixlEnd
from kvplan.errors import KVPlanError
from kvplan.nixl.nixl_wire import NixlRing, NixlWire


class NixlReach:
    """NIXL, for :class:`kvplan.agents.packed.end.End`.

    Args:
        nixl: this process's end of NIXL.
        ring: the registered ring.
        may_renew: returns whether the connection to a peer may be renewed, since nothing packed uses it.
    """

    def __init__(self, nixl: NixlEnd, ring: NixlRing, may_renew: Callable[[str], bool]) -> None:
        self._nixl, self._ring, self._may_renew = nixl, ring, may_renew
        self._broken: set[str] = set()  # peers whose connection is renewed before they are greeted again

    def metadata(self) -> bytes:
        """See :class:`kvplan.agents.packed.end.Reach`."""
        return self._ring.metadata()

    def join(self, peer: str, metadata: bytes) -> None:
        """See :class:`kvplan.agents.packed.end.Reach`; a peer that has restarted replaces the one that was known."""
        if not self.knows(peer, metadata):
            self._nixl.agent().replace(peer, metadata)
            self._broken.discard(peer)

    def knows(self, peer: str, metadata: bytes) -> bool:
        """Add metadata of a peer; return False if NIXL knows another peer of this name, which has died."""
        try:
            self._nixl.agent().add(peer, metadata)
        except KVPlanError:
            return False
        return True

    def wire(self, peer: str, lost: Callable[[str], object]) -> NixlWire:
        """See :class:`kvplan.agents.packed.end.Reach`."""
        agent = self._nixl.agent()
        if peer in self._broken:
            agent.renew(peer)
            self._broken.discard(peer)
        agent.hold(peer, lambda: self._may_renew(peer))

        def gone(why: str) -> None:
            self._broken.add(peer)
            lost(why)

        return NixlWire(agent.end, peer, self._ring.device, gone)

    def tell(self, peer: str, note: bytes) -> None:
        """See :class:`kvplan.agents.packed.end.Reach`."""
        self._nixl.agent().tell(peer, note)

    def leave(self, peer: str) -> None:
        """See :class:`kvplan.agents.packed.end.Reach`."""
        with suppress(KVPlanError):
            self._nixl.agent().let_go(peer)

    def lost(self, peer: str) -> bool:
        """Return whether NIXL has reported a peer as gone, and it was not greeted since."""
        return peer in self._broken
