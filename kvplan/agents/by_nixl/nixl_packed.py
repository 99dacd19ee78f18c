"""The packed way of the transport ``nixl``: its ring, its transfers, and who makes progress."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace

from kvplan.agents.by_nixl.nixl_end import NixlEnd
from kvplan.agents.by_nixl.nixl_lanes import NixlLanes, Ring
from kvplan.agents.by_nixl.nixl_progress import NixlProgress
from kvplan.agents.by_nixl.packed_way import PackedWay, Slots, allocated, ring_for
from kvplan.agents.by_nixl.ring_pages import enter, ring_pages
from kvplan.agents.packed.pack_end import End
from kvplan.cost.wires.wire_model import WireChoice, choose_way, crossing_of, direct_at_once
from kvplan.cost.wires.wire_profile import WireProfile, find_wire, wire_name
from kvplan.errors import TransferError
from kvplan.execute.executor import Executor
from kvplan.execute.stats import Tally
from kvplan.layout.kvlayout import KVLayout
from kvplan.plan.nixl_lists import memory_of
from kvplan.plan.packing.chunk_half import Slot
from kvplan.plan.packing.pack_checks import Offered
from kvplan.plan.packing.pack_order import GRAIN
from kvplan.plan.packing.packing import packing_of
from kvplan.plan.plan import Plan

PACKED_VERSION = 4  # in the card of an agent that takes packed transfers
# Looks in a row that are left out while another thread calls NIXL: most of its calls move bytes as a look does.
MOST_LEFT_OUT = 3


class NixlPacked:
    """This process's end of packed transfers by NIXL. The ring is allocated with the first of them.

    Args:
        name: name of the agent.
        nixl: its end of NIXL.
        offered: function that returns the layouts that peers may name.
        executor: function that returns the executor of a device.
        way: its ring, and who makes progress.
        inside: identifiers of the agent's own threads.
        device: function that returns the device for a ring; by default, the GPU of the layouts of ``nixl``, or the CPU.
        tally: sums to which its transfers are added; by default, sums of its own.

    Attributes:
        lanes: the wires to peers.
    """

    def __init__(
        self,
        name: str,
        nixl: NixlEnd,
        offered: Callable[[], Mapping[str, KVLayout] | Offered],
        executor: Callable[[str], Executor],
        way: PackedWay,
        inside: set[int],
        device: Callable[[], str] | None = None,
        tally: Tally | None = None,
    ) -> None:
        self._device_of, self._tally = device, tally
        self._name, self._nixl, self._executor, self._way = name, nixl, executor, way
        self.lanes = NixlLanes(nixl, offered, self._allocated)
        self._progress = NixlProgress(self._look, self._busy, inside, driven=way.driven) if way.threaded else None
        self._reading = threading.RLock()  # one thread at a time takes notes
        self._inbox: deque[tuple[str, bytes]] = deque()  # notes of users
        self._profiles: dict[str, WireProfile] = {}  # by NIXL's name of the memory
        self._closed = False
        self._entered = False  # whether the ring's GPU is the current device of the thread
        self._left_out = 0  # looks in a row

    def serve_peers(self) -> int:
        """Take requests of peers from now on; return the version for the card, or 0 if it takes none."""
        if self.lanes.refused is not None or self._closed:
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

    @property
    def ring_device(self) -> str:
        """The device of the ring, or of the one that the first packed transfer would allocate."""
        ring = self.lanes.ring  # another thread may close it
        return self._device if ring is None else ring.memory.device

    def prepare(self, plan: Plan, mine: KVLayout, *, reading: bool) -> None:
        """Warm up for the copies between this process's side of plans like this one and a ring, which need not exist.

        Args:
            plan: a plan with a peer. Nothing of it is moved.
            mine: the layout of this side, whose largest region stands for a slot. If it is too small for that, nothing
                is warmed up.
            reading: whether the plan reads from the peer.

        Raises:
            KVPlanError: a transfer would raise it.
        """
        packing = packing_of(plan, most=self._slots.nbytes)
        half, memory = packing.dst if reading else packing.src, max(mine.regions, key=lambda region: region.nbytes)
        start = -(-memory.address // GRAIN) * GRAIN
        slot = Slot(mine, start, memory.address + memory.nbytes - start)
        if half.units and half.unit_nbytes <= slot.nbytes:
            self._executor(mine.device).prepare(half.plan(0, 1, slot))

    def _threaded(self) -> bool:
        return self._progress is not None and self._progress.running

    def _busy(self) -> bool:
        ring = self.lanes.ring
        return ring is not None and (ring.end.busy or self.lanes.busy)

    @property
    def slots(self) -> tuple[int, int]:
        """Number of slots that no peer has, and of all slots for peers; (0, 0) without a ring."""
        ring = self.lanes.ring
        return (0, 0) if ring is None else (ring.end.ring.free, len(ring.end.ring.slots) - ring.end.sending)

    @property
    def in_flight(self) -> int:
        """Number of this process's packed transfers that have not ended."""
        ring = self.lanes.ring
        return 0 if ring is None else sum(ring.end.in_flight(peer) for peer in self.lanes.names)

    # ---- transfers ---------------------------------------------------------------------------------------------------

    def why_not(self, peer: str, plan: Plan, *, reading: bool) -> str | None:
        """Return why a plan cannot be packed, or None."""
        if self._closed:
            return f"the agent {self._name!r} is closed"
        if (why := self.lanes.refused or self.lanes.refusals.get(peer)) is not None:
            return why
        for k, where in ((1 if reading else 0, "here"), (0 if reading else 1, "there")):
            devices = {pair[k].device for pair in plan.layouts}
            if len(devices) > 1:
                return f"its memory {where} is on {' and '.join(sorted(devices))}, and a ring is on one device"
        own = plan.layouts[0][1 if reading else 0].device
        if own not in ("cpu", self.ring_device):
            return f"its memory here is on {own}, and the ring on {self.ring_device}"
        return None

    def choose(self, plan: Plan, *, reading: bool) -> WireChoice:
        """Return the faster way of a plan that can be packed, by a model of the wire."""
        nbytes, wire = self._slots.nbytes, self._wire_of(plan, reading=reading)
        return choose_way(crossing_of(plan, most=nbytes), replace(wire, slot_nbytes=nbytes), pull=reading)

    def direct_at_once(self, plan: Plan, *, reading: bool) -> bool:
        """Return whether a descriptor for each piece of a small plan is faster than a packed transfer begins.

        Other plans need :meth:`choose`, which takes longer than a block moves.
        """
        pieces = sum(part.copies for part in plan.parts)
        return direct_at_once(plan.nbytes, pieces, self._wire_of(plan, reading=reading), pull=reading)

    def _wire_of(self, plan: Plan, *, reading: bool) -> WireProfile:
        """Return the profile of the wire between memory like this process's side of a plan."""
        return self._wire(plan.layouts[0][1 if reading else 0].device if plan.layouts else "cpu")

    def _wire(self, device: str) -> WireProfile:
        """Return the profile of the wire between memory like a device's."""
        memory = memory_of(device, "the memory")[0]
        wire = self._profiles.get(memory)
        if wire is None:
            wire = self._profiles[memory] = find_wire(wire_name(self._nixl.backends[0]), memory)
        return wire

    def end_for(self, peer: str) -> End:
        """Return the end for a transfer with a peer that NIXL knows; ask for the peer's ring if this is the first one.

        Raises:
            KVPlanError: the ring cannot be allocated or registered, or NIXL does not reach the peer.
        """
        ring = self.lanes.ring
        return ring.end if ring is not None and self.lanes.known(peer) else self.lanes.ask(peer).end

    def close(self, timeout: float) -> None:
        """Part from all peers, and free the ring.

        Raises:
            TransferError: writes into the ring may still move.
        """
        ring = self.lanes.ring
        if ring is not None:
            ring.end.close(timeout)
        self.stop(timeout)
        with self.lanes.lock:
            if ring is not None:
                self.lanes.close()
                ring.registered.close()
            self.lanes.ring = None

    def stop(self, timeout: float) -> None:
        """End the thread; nothing packed moves any more, and the ring stays."""
        self._closed = True
        if self._progress is not None:
            self._progress.stop()
            self._progress.thread.join(timeout)

    # ---- notes -------------------------------------------------------------------------------------------------------

    def notes(self) -> list[tuple[str, bytes]]:
        """Return the users' notes that have come since the last call."""
        self.read()
        found = []
        with suppress(IndexError):
            while True:
                found.append(self._inbox.popleft())
        ring = self.lanes.ring
        return found if ring is None else found + ring.end.notes()

    def poll(self) -> bool:
        """Move everything on that can move now; return whether anything did."""
        ring = self.lanes.ring
        if ring is not None:
            return bool(ring.end.poll())
        self.read()
        return False

    def _look(self) -> bool:
        """Poll in the agent's own thread.

        A small direct transfer takes as long as two looks. A look beside it waits for NIXL's lock, then the caller for
        the interpreter. So while nothing packed is in flight, a look is left out if another thread has the lock.
        """
        ring = self.lanes.ring
        if self._left_out < MOST_LEFT_OUT and not self._busy():
            lock = self._nixl.agent().lock
            if not lock.acquire(blocking=False):
                self._left_out += 1
                return False
            lock.release()
        self._left_out = 0
        if ring is not None and not self._entered:
            self._entered = True
            enter(ring.memory.device)
        return self.poll()

    def read(self) -> None:
        """Take the notes that have come: those of the protocol go to the end, and the users' wait for :meth:`notes`."""
        with self._reading:
            for peer, note in self._nixl.agent().notes():
                if not self.lanes.take(peer, note):
                    self._inbox.append((peer, note))
            self.lanes.look()

    # ---- the ring ----------------------------------------------------------------------------------------------------

    @property
    def _device(self) -> str:
        """The device for a ring: the GPU of this process's layouts, or the CPU."""
        if self._device_of is not None:
            return self._device_of()
        return min({layout.device for layout in self._nixl.layouts.values()} - {"cpu"}, default="cpu")

    @property
    def _slots(self) -> Slots:
        ring = self.lanes.ring
        if ring is not None:  # its slots stay as they are
            return Slots(len(ring.end.ring.slots), ring.end.ring.slot_nbytes)
        device = self._device
        return self._way.slots or ring_for(device, self._wire(device))

    def _allocated(self) -> Ring:
        """Return the ring; allocate it if there is none. The caller holds the lock of the lanes."""
        if self.lanes.ring is not None:
            return self.lanes.ring
        if self._closed:
            raise TransferError(f"the agent {self._name!r} is closed")
        device = self._device
        from kvplan.plan.packing import column_loops

        column_loops.load()  # rather than within a transfer
        slots, memory = allocated(device, self._slots, ring_pages, smaller=self._way.slots is None)
        registered = self._nixl.agent().ring(memory.data_ptr(), memory.shape[1], memory.device)
        try:
            end = End(
                self._name, memory, slots.nbytes, self._executor(device), self.read,
                threaded=self._threaded, wake=self.wake, tally=self._tally,
            )  # fmt: skip
        except BaseException:
            registered.close()
            raise
        if self._progress is not None and memory.device != "cpu":
            self._progress.patient = True
        self.lanes.ring = Ring(end, registered, memory)
        return self.lanes.ring
