"""The wires of the packed way to each peer: the handshake, deaths, and the end of a wire when nothing moves in it."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import NamedTuple

from kvplan.agents.by_nixl.nixl_end import NixlEnd
from kvplan.agents.packed.pack_end import End
from kvplan.agents.packed.pack_messages import HELLO, read
from kvplan.agents.packed.pack_messages import MAGIC as PROTOCOL
from kvplan.base.quoting import quoted
from kvplan.errors import KVPlanError, PathError, TransferError
from kvplan.layout.kvlayout import KVLayout
from kvplan.nixl.nixl_wire import NixlRing, NixlWire
from kvplan.plan.packing.pack_checks import Offered
from kvplan.plan.row_plans import Memory

MAGIC = b"kvplan.wire/1"
ASK, ANSWER, REFUSE, PROBE, LOST = b"?", b"!", b"-", b".", b"x"
PROBE_SECONDS = 0.5  # between two questions whether a peer with transfers in flight lives
IDLE_SECONDS = 5.0  # after which the wire to a peer that has left is released
WORDS = 500  # most characters of a refusal
MOST_EARLY = 16  # most greetings of a peer that are kept until its handshake

log = logging.getLogger("kvplan.agents")


class Ring(NamedTuple):
    """The ring of an agent.

    Attributes:
        end: the end that uses it.
        registered: NIXL's registration.
        memory: its memory.
    """

    end: End
    registered: NixlRing
    memory: Memory


class LaneWire(NixlWire):
    """A wire that tells when the end has closed it.

    Args:
        nixl: this process's end of NIXL.
        peer: name of the peer.
        device: the device of the ring.
        lost: as of :class:`kvplan.nixl.nixl_wire.NixlWire`.
        closed: called with the wire, once nothing moves in it any more.
    """

    def __init__(
        self, nixl: NixlEnd, peer: str, device: str, lost: Callable[[str], object],
        closed: Callable[[LaneWire], object],
    ) -> None:  # fmt: skip
        super().__init__(nixl.agent().end, peer, device, lost)
        self._closed = closed
        self.left_at: float | None = None  # since when there is no lane to the peer
        self.mute = False  # whether notes are dropped, since NIXL knows the peer no more

    def tell(self, note: bytes) -> None:
        """Send a note; see :meth:`kvplan.nixl.nixl_wire.NixlWire.tell`."""
        if not self.mute:
            super().tell(note)

    def close(self) -> None:
        """Release the writes that wait to be posted again."""
        super().close()
        self._closed(self)


class NixlLanes:
    """The wires to all peers. One thread at a time calls :meth:`take` and :meth:`look`.

    Args:
        nixl: this process's end of NIXL.
        offered: returns the layouts that peers may name.
        ring_for: allocates the ring if there is none, and returns it.

    Attributes:
        lock: lock of the wires and of the ring.
        ring: the ring, once it is allocated.
        refused: why this process takes no packed transfer; None while it does.
        refusals: by peer, why it takes none.
    """

    def __init__(
        self, nixl: NixlEnd, offered: Callable[[], Mapping[str, KVLayout] | Offered], ring_for: Callable[[], Ring]
    ) -> None:
        self.lock = threading.RLock()
        self.ring: Ring | None = None
        self.refused: str | None = None
        self.refusals: dict[str, str] = {}
        self._nixl, self._offered, self._ring_for = nixl, offered, ring_for
        self._wires: dict[str, LaneWire] = {}
        self._leaving: list[LaneWire] = []  # they may still be used by what has not ended
        self._early: dict[str, list[bytes]] = {}  # greetings that came before the peer's handshake
        self._gone: deque[tuple[str, str]] = deque()  # peers that NIXL reports as gone, and why
        self._closed: deque[LaneWire] = deque()
        self._broken: set[str] = set()  # peers whose connection is renewed before the next handshake
        self._probe_at = 0.0

    @property
    def busy(self) -> bool:
        """Whether a handshake has not ended, or a wire is about to end."""
        return bool(self._leaving) or not all(wire.greeted for wire in list(self._wires.values()))

    @property
    def names(self) -> list[str]:
        """Names of the peers."""
        return list(self._wires)

    def known(self, peer: str) -> bool:
        """Return whether transfers with a peer may be submitted to the end."""
        return self.ring is not None and peer in self._wires and self.ring.end.has(peer)

    def greeted(self, peer: str) -> bool:
        """Return whether the handshake with a peer has ended."""
        wire = self._wires.get(peer)
        return wire is not None and wire.greeted

    def held(self, peer: str) -> bool:
        """Return whether there is a wire to a peer, also one that is about to end."""
        return peer in self._wires or any(wire.peer == peer for wire in self._leaving)

    def lost(self, peer: str) -> bool:
        """Return whether NIXL has reported a peer as gone, and no handshake has begun since."""
        return peer in self._broken or any(peer == gone for gone, _ in list(self._gone))

    # ---- beginning and end -------------------------------------------------------------------------------------------

    def met(self, peer: str, metadata: bytes) -> None:
        """Take a new card of a peer: if the peer has restarted, its wires are lost."""
        with self.lock:
            self.refusals.pop(peer, None)
            if self.held(peer):
                self._know(peer, metadata)

    def ask(self, peer: str) -> Ring:
        """Ask a peer that NIXL knows for its ring, if that was not done.

        Raises:
            KVPlanError: there is no ring here, or NIXL does not reach the peer.
        """
        with self.lock:
            ring = self._ring_for()
            if not self.known(peer):
                if peer in self._broken:
                    self._nixl.agent().renew(peer)
                    self._broken.discard(peer)
                wire = self._add(ring, peer)
                try:
                    wire.tell(MAGIC + ASK + ring.registered.metadata())
                except TransferError as error:
                    self._lose(peer, str(error))
                    raise
            return ring

    def forget(self, peer: str) -> None:
        """Say goodbye to a peer. NIXL knows it until nothing moves any more."""
        with self.lock:
            if self.ring is not None and peer in self._wires:
                self._leaving.append(self._wires.pop(peer))
                self.ring.end.forget(peer)

    def abandon(self, peer: str) -> None:
        """Say no more to a peer that was told goodbye and has not answered: NIXL will know it no more.

        The peer may still write, so its slots have no other use until it answers.
        """
        with self.lock:
            for wire in [wire for wire in self._leaving if wire.peer == peer]:
                wire.mute = True
                self._leaving.remove(wire)
            self._nixl.agent().let_go(peer)

    def close(self) -> None:
        """Release everything that NIXL has; the end is closed."""
        with self.lock:
            wires = [*self._wires.values(), *self._leaving]
            self._wires.clear()
            self._leaving.clear()
            for wire in wires:
                wire.close()
                self._nixl.agent().let_go(wire.peer)

    def _add(self, ring: Ring, peer: str) -> LaneWire:
        """Open a lane to a peer, by the wire that there is, or a new one."""
        wire = self._wires.get(peer)
        if wire is None:
            wire = LaneWire(
                self._nixl, peer, ring.memory.device, lambda why: self._gone.append((peer, why)), self._closed.append
            )
            self._nixl.agent().hold(peer, lambda: self._may_renew(peer))
        ring.end.add(peer, wire, self._offered())
        self._wires[peer] = wire
        wire.left_at = None
        return wire

    def _may_renew(self, peer: str) -> bool:
        """Let the direct way renew the connection if no packed transfer is in flight: the wire is lost by it."""
        if self.ring is not None and self.ring.end.in_flight(peer):
            return False
        self._gone.append((peer, "its connection was renewed"))
        return True

    def _lose(self, peer: str, why: str) -> None:
        with self.lock:
            if self.ring is not None:
                self.ring.end.lost(peer, why)
            if (wire := self._wires.pop(peer, None)) is not None:
                self._leaving.append(wire)

    def _know(self, peer: str, metadata: bytes) -> None:
        """Give NIXL what a peer has told; if the peer has restarted, in place of what NIXL knew of it."""
        nixl = self._nixl.agent()
        try:
            nixl.add(peer, metadata)
        except KVPlanError:  # NIXL knows it as it was
            self._see_gone()
            self._lose(peer, "it has restarted")
            nixl.replace(peer, metadata)
            self._broken.discard(peer)

    def _see_gone(self) -> None:
        """Lose the peers that NIXL has reported as gone."""
        with suppress(IndexError):
            while True:  # two threads may do so at once
                peer, why = self._gone.popleft()
                self._broken.add(peer)
                self._lose(peer, why)

    def _release(self) -> None:
        """Let NIXL forget peers to which no wire is left."""
        while self._closed:
            wire = self._closed.popleft()
            if wire in self._leaving:
                self._leaving.remove(wire)
                if not self.held(wire.peer):
                    if wire.peer in self._broken:  # this process writes no more; the peer, if it lives, need not wait
                        with suppress(TransferError):
                            wire.tell(MAGIC + LOST)
                    self._nixl.agent().let_go(wire.peer)

    # ---- notes -------------------------------------------------------------------------------------------------------

    def take(self, peer: str, note: bytes) -> bool:
        """Take a note; return False if it is a user's."""
        if note.startswith(MAGIC):
            self._greeted(peer, note[len(MAGIC) :][:1], note[len(MAGIC) + 1 :])
            return True
        if not note.startswith(PROTOCOL):
            return False
        wire = self._wires.get(peer)
        if (wire is None or not wire.greeted) and _greets(note):
            early = self._early.setdefault(peer, [])
            early.append(note)
            del early[:-MOST_EARLY]
        elif self.ring is not None:
            self.ring.end.take(peer, note)
        return True

    def look(self) -> None:
        """Ask peers whether they live, and end wires, when it is time."""
        self._see_gone()
        if self._closed:
            with self.lock:
                self._release()
        now = time.monotonic()
        if self.ring is not None and now > self._probe_at:
            self._probe_at = now + PROBE_SECONDS
            self._probe(self.ring, now)

    def _probe(self, ring: Ring, now: float) -> None:
        """Ask peers whether they live, if something waits for them; release wires that have no use."""
        for peer, wire in list(self._wires.items()):
            if ring.end.has(peer):
                wire.left_at = None
            elif wire.left_at is None:
                wire.left_at = now
            elif now > wire.left_at + IDLE_SECONDS:
                self.forget(peer)
        for wire in [*self._wires.values(), *self._leaving]:
            if wire in self._leaving or ring.end.in_flight(wire.peer):
                with suppress(TransferError):
                    wire.tell(MAGIC + PROBE)

    def _greeted(self, peer: str, kind: bytes, body: bytes) -> None:
        try:
            if kind == ASK:
                self._answer(peer, body)
            elif kind == ANSWER and peer in self._wires:
                self._nixl.agent().add(peer, body)
                self._open(peer)
            elif kind == LOST and peer in self._wires and self._wires[peer].greeted:
                self._lose(peer, "it has lost this process")
            elif kind == REFUSE:
                why = f"it takes no packed transfer: {quoted(body[:WORDS].decode(errors='replace'))}"
                self.refusals[peer] = why
                self._lose(peer, why)
        except KVPlanError as error:
            log.warning("no packed transfers with %s: %s", peer, error)
            self._lose(peer, str(error))

    def _answer(self, peer: str, metadata: bytes) -> None:
        """Tell a peer that asks where the ring is; a peer that has restarted replaces the one that was known."""
        nixl = self._nixl.agent()
        with self.lock:
            self._know(peer, metadata)
            try:
                if self.refused is not None:
                    raise PathError(self.refused)
                ring = self._ring_for()
                wire = self._wires.get(peer) or self._add(ring, peer)
                wire.tell(MAGIC + ANSWER + ring.registered.metadata())
            except KVPlanError as error:
                nixl.tell(peer, MAGIC + REFUSE + str(error).encode()[:WORDS])
                raise
        self._open(peer)

    def _open(self, peer: str) -> None:
        """Let the protocol begin with a peer whose ring NIXL knows now."""
        wire, ring = self._wires.get(peer), self.ring
        if wire is not None and ring is not None:
            wire.greet()
            for note in self._early.pop(peer, []):
                ring.end.take(peer, note)


def _greets(note: bytes) -> bool:
    """Return whether a message is a greeting, whose ring NIXL does not know before the handshake has ended."""
    try:
        return read(note).kind == HELLO
    except KVPlanError:  # the end tells the peer
        return False
