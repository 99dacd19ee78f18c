"""The packed way of the transport ``nixl``: its ring, its handshake with peers, and who makes progress."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress

from kvplan.agents.by_nixl.nixl_end import NixlEnd
from kvplan.agents.by_nixl.nixl_progress import NixlProgress
from kvplan.agents.by_nixl.packed_way import GPU_SLOTS, HOST_SLOTS, PackedWay
from kvplan.agents.packed.pack_end import End
from kvplan.agents.packed.pack_messages import MAGIC as PROTOCOL
from kvplan.agents.packed.ring_pages import ring_pages
from kvplan.base.quoting import quoted
from kvplan.errors import KVPlanError, PathError, TransferError
from kvplan.execute.executor import Executor
from kvplan.layout.kvlayout import KVLayout
from kvplan.nixl.nixl_wire import NixlRing, NixlWire
from kvplan.plan.plan import Plan
from kvplan.plan.row_plans import Memory

PACKED_VERSION = 1  # in the card of an agent that takes packed transfers
MAGIC = b"kvplan.wire/1"
ASK, ANSWER, REFUSE, PROBE = b"?", b"!", b"-", b"."
PROBE_SECONDS = 0.5  # between two questions whether a peer with transfers in flight lives
WORDS = 500  # most characters of a refusal

log = logging.getLogger("kvplan.agents")


class NixlPacked:
    """This process's end of packed transfers by NIXL. The ring is allocated with the first of them.

    Args:
        name: name of the agent.
        nixl: its end of NIXL.
        offered: function that returns the layouts that peers may name.
        executor: function that returns the executor of a device.
        way: its ring, and who makes progress.
        inside: identifiers of the agent's own threads.

    Attributes:
        refused: why this process takes no packed transfer; None while it does.
    """

    def __init__(
        self,
        name: str,
        nixl: NixlEnd,
        offered: Callable[[], Mapping[str, KVLayout]],
        executor: Callable[[str], Executor],
        way: PackedWay,
        inside: set[int],
    ) -> None:
        self.refused: str | None = None
        self._name, self._nixl, self._offered, self._executor, self._way = name, nixl, offered, executor, way
        self._progress = NixlProgress(self.poll, self._busy, inside) if way.threaded else None
        self._lock = threading.RLock()  # of the ring and the wires
        self._reading = threading.RLock()  # one thread at a time takes notes
        self._end: End | None = None
        self._memory: Memory | None = None
        self._ring: NixlRing | None = None
        self._wires: dict[str, NixlWire] = {}
        self._refusals: dict[str, str] = {}  # by peer, why it takes no packed transfer
        self._early: dict[str, list[bytes]] = {}  # notes of the protocol that came before the peer's handshake
        self._gone: deque[tuple[str, str]] = deque()  # peers that NIXL reports as gone, and why
        self._inbox: deque[tuple[str, bytes]] = deque()  # notes of users
        self._probe_at = 0.0
        self._closed = False

    def serve_peers(self) -> int:
        """Take requests of peers from now on; return the version for the card, or 0 if it takes none."""
        if self.refused is not None or self._closed:
            return 0
        self.start()
        return PACKED_VERSION

    def start(self) -> None:
        """Start the thread that makes progress, if a thread makes it."""
        if self._progress is not None:
            self._progress.start()

    def wake(self) -> None:
        """Let the thread look now, if there is one."""
        if self._progress is not None:
            self._progress.wake()

    def _busy(self) -> bool:
        end = self._end
        return end is not None and (end.busy or not all(wire.greeted for wire in list(self._wires.values())))

    @property
    def slots(self) -> tuple[int, int]:
        """Number of slots that no peer has, and of all slots for peers; (0, 0) without a ring."""
        end = self._end
        return (0, 0) if end is None else (end.ring.free, len(end.ring.slots) - end.sending)

    @property
    def in_flight(self) -> int:
        """Number of this process's packed transfers that have not ended."""
        end = self._end
        return 0 if end is None else sum(end.in_flight(peer) for peer in list(self._wires))

    # ---- transfers ---------------------------------------------------------------------------------------------------

    def why_not(self, peer: str, plan: Plan, *, reading: bool) -> str | None:
        """Return why a plan cannot be packed, or None."""
        if self._closed:
            return f"the agent {self._name!r} is closed"
        if (why := self.refused or self._refusals.get(peer)) is not None:
            return why
        devices = {pair[1 if reading else 0].device for pair in plan.layouts} - {"cpu"}
        if len(devices) > 1:
            return f"its memory here is on {' and '.join(sorted(devices))}, and a ring is on one device"
        memory = self._memory
        if memory is not None and devices - {memory.device}:
            return f"its memory here is on {devices.pop()}, and the ring on {memory.device}"
        return None

    def end_for(self, peer: str, plan: Plan, *, reading: bool) -> End:
        """Return the end for a transfer with a peer that NIXL knows; ask for the peer's ring if this is the first one.

        Raises:
            KVPlanError: the ring cannot be allocated or registered, or NIXL does not reach the peer.
        """
        end = self._end
        if end is not None and peer in self._wires:
            return end
        with self._lock:
            devices = {pair[1 if reading else 0].device for pair in plan.layouts} - {"cpu"}
            end, ring = self._ring_on(min(devices, default="cpu"))
            if peer not in self._wires:
                self._add(end, peer).tell(MAGIC + ASK + ring.metadata())
            return end

    def forget(self, peer: str) -> None:
        """Part from a peer: its transfers end."""
        with self._lock:
            wire, end = self._wires.pop(peer, None), self._end
        if wire is not None and end is not None:
            end.forget(peer)
            wire.close()

    def close(self, timeout: float) -> None:
        """Part from all peers, and free the ring.

        Raises:
            TransferError: writes into the ring may still move.
        """
        end = self._end
        if end is not None:
            end.close(timeout)
        self._closed = True
        if self._progress is not None:
            self._progress.stop()
            self._progress.thread.join(timeout)
        with self._lock:
            for wire in self._wires.values():
                wire.close()
            self._wires.clear()
            if self._ring is not None:
                self._ring.close()
            self._end = self._ring = self._memory = None

    # ---- notes -------------------------------------------------------------------------------------------------------

    def notes(self) -> list[tuple[str, bytes]]:
        """Return the users' notes that have come since the last call."""
        self.read()
        end, found = self._end, []
        with suppress(IndexError):
            while True:
                found.append(self._inbox.popleft())
        return found if end is None else found + end.notes()

    def poll(self) -> bool:
        """Move everything on that can move now; return whether anything did."""
        end = self._end
        if end is not None:
            return bool(end.poll())
        self.read()
        return False

    def read(self) -> None:
        """Take the notes that have come: those of the protocol go to the end, and the users' wait for :meth:`notes`."""
        with self._reading:
            for peer, note in self._nixl.agent().notes():
                if note.startswith(MAGIC):
                    self._greeted(peer, note[len(MAGIC) :][:1], note[len(MAGIC) + 1 :])
                elif not note.startswith(PROTOCOL):
                    self._inbox.append((peer, note))
                elif self._end is None or peer not in self._wires or not self._wires[peer].greeted:
                    self._early.setdefault(peer, []).append(note)
                else:
                    self._end.take(peer, note)
            self._probe()
            while self._gone:
                peer, why = self._gone.popleft()
                with self._lock:
                    known = self._wires.pop(peer, None)
                if known is not None and self._end is not None:
                    self._end.lost(peer, why)
                    known.close()

    def _greeted(self, peer: str, kind: bytes, body: bytes) -> None:
        """Take a note of a peer's handshake."""
        try:
            if kind == ASK:
                self._answer(peer, body)
            elif kind == ANSWER and peer in self._wires:
                self._nixl.agent().add(peer, body)
                self._open(peer)
            elif kind == REFUSE:
                why = f"it takes no packed transfer: {quoted(body[:WORDS].decode(errors='replace'))}"
                self._refusals[peer] = why
                self._gone.append((peer, why))
        except KVPlanError as error:
            log.warning("no packed transfers with %s: %s", peer, error)
            self._gone.append((peer, str(error)))

    def _answer(self, peer: str, metadata: bytes) -> None:
        """Tell a peer that asks where the ring is; a peer that has restarted replaces the one that was known."""
        nixl = self._nixl.agent()
        with self._lock:
            device = min({layout.device for layout in self._offered().values()} - {"cpu"}, default="cpu")
            known = self._wires.get(peer)
            try:
                nixl.add(peer, metadata)
            except KVPlanError:  # it has restarted, and NIXL knows it as it was
                self._wires.pop(peer, None)
                if known is not None and self._end is not None:
                    self._end.lost(peer, "it has restarted")
                    known.close()
                known = None
                nixl.replace(peer, metadata)
            try:
                if self.refused is not None:
                    raise PathError(self.refused)
                end, ring = self._ring_on(device)
                wire = known or self._add(end, peer)
                wire.tell(MAGIC + ANSWER + ring.metadata())
            except KVPlanError as error:
                nixl.tell(peer, MAGIC + REFUSE + str(error).encode()[:WORDS])
                raise
        self._open(peer)

    def _open(self, peer: str) -> None:
        """Let the protocol begin with a peer whose ring NIXL knows now."""
        wire, end = self._wires.get(peer), self._end
        if wire is not None and end is not None:
            wire.greet()
            for note in self._early.pop(peer, []):
                end.take(peer, note)

    def _probe(self) -> None:
        """Send a note to each peer with transfers in flight, now and then: NIXL then tells whether the peer is gone."""
        now = time.monotonic()
        if now < self._probe_at or self._end is None:
            return
        self._probe_at = now + PROBE_SECONDS
        for peer, wire in list(self._wires.items()):
            if self._end.in_flight(peer):
                with suppress(TransferError):
                    wire.tell(MAGIC + PROBE)

    # ---- the ring ----------------------------------------------------------------------------------------------------

    def _ring_on(self, device: str) -> tuple[End, NixlRing]:
        """Return the end and its ring; allocate them on a device if there are none."""
        if self._end is not None and self._ring is not None:
            return self._end, self._ring
        if self._closed:
            raise TransferError(f"the agent {self._name!r} is closed")
        slots = self._way.slots or (HOST_SLOTS if device == "cpu" else GPU_SLOTS)
        memory = ring_pages(slots.number * slots.nbytes, device)
        ring = self._nixl.agent().ring(memory.data_ptr(), memory.shape[1], memory.device)
        try:
            end = End(self._name, memory, slots.nbytes, self._executor(device), self.read)
        except BaseException:
            ring.close()
            raise
        self._memory, self._ring, self._end = memory, ring, end
        return end, ring

    def _add(self, end: End, peer: str) -> NixlWire:
        device = "cpu" if self._memory is None else self._memory.device
        wire = self._nixl.agent().wire(peer, device, lambda why: self._gone.append((peer, why)))
        end.add(peer, wire, self._offered())
        self._wires[peer] = wire
        return wire
