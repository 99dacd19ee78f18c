"""The wires of the packed way to each peer: the handshake, deaths, and the end of a wire when nothing moves in it."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import NamedTuple

from kvplan.agents.by_nixl.end_view import NixlPackEnd
from kvplan.agents.by_nixl.nixl_end import NixlEnd
from kvplan.agents.packed.pack_messages import HELLO
from kvplan.agents.packed.pack_messages import MAGIC as PROTOCOL
from kvplan.base.quoting import quoted
from kvplan.errors import KVPlanError, PathError, TransferError
from kvplan.layout.kvlayout import KVLayout
from kvplan.nixl.nixl_wire import NixlRing, NixlWire
from kvplan.plan.row_plans import Memory

MAGIC = b"kvplan.wire/1"
ASK, ANSWER, REFUSE, PROBE, LOST = b"?", b"!", b"-", b".", b"x"
PROBE_SECONDS = 0.5  # between two questions whether a peer with transfers in flight lives
SWEEP_SECONDS = 0.02  # between two looks for wires that have ended
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

    end: NixlPackEnd
    registered: NixlRing
    memory: Memory


class NixlLanes:
    """The wires to all peers. One thread at a time calls :meth:`take` and :meth:`look`, and one
    :meth:`greet`.

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
        self, nixl: NixlEnd, offered: Callable[[], Mapping[str, KVLayout]], ring_for: Callable[[], Ring]
    ) -> None:
        self.lock = threading.RLock()
        self.ring: Ring | None = None
        self.refused: str | None = None
        self.refusals: dict[str, str] = {}
        self._nixl, self._offered, self._ring_for = nixl, offered, ring_for
        self._wires: dict[str, NixlWire] = {}
        self._leaving: list[NixlWire] = []  # they may still be used by what has not ended
        self._early: dict[str, list[bytes]] = {}  # greetings that came before the peer's handshake
        self._heard: deque[tuple[str, bytes, bytes]] = deque()  # notes of handshakes: peer, kind and body
        self._gone: deque[tuple[str, str]] = deque()  # peers that NIXL reports as gone, and why
        self._broken: set[str] = set()  # peers whose connection is renewed before the next handshake
        self._probe_at = self._sweep_at = 0.0

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
        return self.ring is not None and peer in self._wires and self.ring.end.open(peer)

    # ---- beginning and end -------------------------------------------------------------------------------------------

    def met(self, peer: str, metadata: bytes) -> None:
        """Take a new card of a peer: if the peer has restarted, its wires are lost."""
        with self.lock:
            self.refusals.pop(peer, None)
            if self._held(peer):
                try:
                    self._nixl.agent().add(peer, metadata)
                except KVPlanError:
                    self._lose(peer, "it has restarted")

    def ask(self, peer: str) -> Ring:
        """Ask a peer that NIXL knows for its ring, if that was not done.

        Raises:
            KVPlanError: there is no ring here, or NIXL does not reach the peer.
        """
        with self.lock:
            ring = self._ring_for()
            if not self.known(peer):
                self._sweep()
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

    def close(self) -> None:
        """Release everything that NIXL has; the end is closed."""
        with self.lock:
            wires = [*self._wires.values(), *self._leaving]
            self._wires.clear()
            self._leaving.clear()
            for wire in wires:
                wire.close()
                self._nixl.agent().let_go(wire.peer)

    def _add(self, ring: Ring, peer: str) -> NixlWire:
        nixl = self._nixl.agent()
        wire = nixl.wire(peer, ring.memory.device, lambda why: self._gone.append((peer, why)))
        ring.end.add(peer, wire, self._offered())
        if (known := self._wires.pop(peer, None)) is not None:
            self._leaving.append(known)
        self._wires[peer] = wire
        nixl.hold(peer, lambda: self._may_renew(peer))
        return wire

    def _held(self, peer: str) -> bool:
        return peer in self._wires or any(wire.peer == peer for wire in self._leaving)

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

    def _sweep(self) -> None:
        """Release the wires that no lane uses any more."""
        ring = self.ring
        if ring is None:
            return
        with self.lock:
            for peer in [peer for peer in self._wires if not ring.end.open(peer)]:
                self._leaving.append(self._wires.pop(peer))
            for wire in [wire for wire in self._leaving if not ring.end.uses(wire)]:
                self._leaving.remove(wire)
                wire.close()
                if not self._held(wire.peer):
                    if wire.peer in self._broken:  # this process writes no more; the peer, if it lives, need not wait
                        with suppress(TransferError):
                            wire.tell(MAGIC + LOST)
                    self._nixl.agent().let_go(wire.peer)

    # ---- notes -------------------------------------------------------------------------------------------------------

    def take(self, peer: str, note: bytes) -> bool:
        """Take a note; return False if it is a user's."""
        if note.startswith(MAGIC):
            self._heard.append((peer, note[len(MAGIC) :][:1], note[len(MAGIC) + 1 :]))
            return True
        if not note.startswith(PROTOCOL):
            return False
        wire = self._wires.get(peer)
        if note[len(PROTOCOL) : len(PROTOCOL) + 1] == bytes([HELLO]) and (wire is None or not wire.greeted):
            early = self._early.setdefault(peer, [])
            early.append(note)
            del early[:-MOST_EARLY]
        elif self.ring is not None:
            self.ring.end.take(peer, note)
        return True

    def look(self) -> None:
        """Ask peers whether they live, and end wires, when it is time."""
        while self._gone:
            peer, why = self._gone.popleft()
            self._broken.add(peer)
            self._lose(peer, why)
        now = time.monotonic()
        if self.ring is None or now < self._sweep_at:
            return
        self._sweep_at = now + SWEEP_SECONDS
        self._sweep()
        if now < self._probe_at:
            return
        self._probe_at = now + PROBE_SECONDS
        for wire in [*self._wires.values(), *self._leaving]:
            if wire in self._leaving or self.ring.end.in_flight(wire.peer):
                with suppress(TransferError):
                    wire.tell(MAGIC + PROBE)

    def greet(self) -> None:
        """Answer the notes of handshakes that came, after the messages that came before them were heard."""
        while self._heard:
            self._greeted(*self._heard.popleft())

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
            try:
                nixl.add(peer, metadata)
            except KVPlanError:  # it has restarted, and NIXL knows it as it was
                self._lose(peer, "it has restarted")
                nixl.replace(peer, metadata)
            try:
                if self.refused is not None:
                    raise PathError(self.refused)
                ring = self._ring_for()
                wire = self._wires[peer] if self.known(peer) else self._add(ring, peer)
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
