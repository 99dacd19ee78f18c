"""The packed way of the transport ``nixl``: its ring, its transfers, and the thread that makes progress."""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

from kvplan.agents.by_nixl.nixl_end import PACKED, NixlEnd
from kvplan.agents.by_nixl.nixl_wire import NixlReach
from kvplan.agents.packed.end import End
from kvplan.agents.packed.line import MOST_PROGRAMS, too_many
from kvplan.agents.packed.messages import HELLO, MAGIC, Hello, Inbox, Message, refusal
from kvplan.agents.packed.programs import Offer
from kvplan.agents.packed.ring import Ring, Slots, allocated, enter, ring_for, ring_pages
from kvplan.base.quoting import quoted
from kvplan.base.threads import Bell, Worker
from kvplan.cost.wires.wire_model import WireChoice, choose_way, crossing_of, direct_at_once
from kvplan.cost.wires.wire_profile import WireProfile, find_wire, wire_name
from kvplan.errors import KVPlanError, TransferError
from kvplan.execute.executor import Executor
from kvplan.execute.stats import Tally
from kvplan.layout.kvlayout import KVLayout
from kvplan.plan.chunk_order import GRAIN
from kvplan.plan.chunks import Chunks, outlines_of, sources_of
from kvplan.plan.nixl_lists import memory_of
from kvplan.plan.plan import Plan

PACKED_VERSION = 5  # in the card of an agent that takes packed transfers

SPIN_SECONDS = 50e-6  # after a look that found something: the next ones follow without a nap
BUSY_NAP = 1e-4  # seconds between two looks while transfers are in flight
IDLE_NAP = 2e-4  # the same when nothing is in flight: a peer's direct transfer over TCP moves on by these looks
REST_NAP = 2e-3  # the same after REST_SECONDS
REST_SECONDS = 10.0

TIMER_SLACK = 29  # PR_SET_TIMERSLACK of prctl
SLACK_NS = 1000  # the default is 50,000: a nap of 100 us then takes over 150

log = logging.getLogger("kvplan.agents")


class PackedWay(NamedTuple):
    """How an agent takes packed transfers.

    Attributes:
        slots: its ring; None for one that fits its device.
        threaded: whether a thread makes progress; otherwise :meth:`kvplan.Agent.poll` does.
    """

    slots: Slots | None = None
    threaded: bool = True


def checked_progress(progress: object) -> str:
    """Return who makes progress; raise KVPlanError if it is unknown.

    >>> checked_progress(None), checked_progress("step")
    ('thread', 'step')
    """
    if progress is None:
        return "thread"
    if progress not in ("thread", "step"):
        raise KVPlanError(f"progress is {quoted(progress)}; expected 'thread', 'step' or None")
    return str(progress)


class Opened(NamedTuple):
    """What exists from the first packed transfer on.

    Attributes:
        end: the end.
        reach: how it reaches peers.
    """

    end: End
    reach: NixlReach


class NixlPacked:
    """This process's end of packed transfers by NIXL. The ring is allocated with the first of them.

    Args:
        name: name of the agent.
        nixl: its end of NIXL.
        offer: function that returns the memory that peers may name.
        executor: function that returns the executor of a device.
        way: its ring, and who makes progress.
        device: function that returns the device for a ring; by default, the GPU of the layouts of ``nixl``, or the CPU.
        tally: sums to which its transfers are added; by default, sums of its own.

    Attributes:
        opened: what exists from the first packed transfer on; None before.
    """

    def __init__(
        self, name: str, nixl: NixlEnd, offer: Callable[[], Offer], executor: Callable[[str], Executor], way: PackedWay,
        device: Callable[[], str] | None = None, tally: Tally | None = None,
    ) -> None:  # fmt: skip
        self.opened: Opened | None = None
        self._device_of, self._tally = device, tally
        self._name, self._nixl, self._offer, self._executor, self._way = name, nixl, offer, executor, way
        self._bell, self._failed = Bell(), ""  # the error of the last look, which is logged once
        self._thread = Worker("kvplan-nixl", self._serve, "no thread makes progress for NIXL")
        self._lock = threading.RLock()  # of the ring's allocation
        self._reading = threading.RLock()  # one thread at a time takes notes
        self._inbox = Inbox()  # notes of users
        self._profiles: dict[str, WireProfile] = {}  # by NIXL's name of the memory
        self._closed = False

    def serve_peers(self) -> int:
        """Take requests of peers from now on; return the version for the card, or 0 if it takes none."""
        if self._closed:
            return 0
        self.start()
        return PACKED_VERSION

    def start(self) -> None:
        """Start the thread that makes progress, if a thread makes it."""
        if self._way.threaded and not self._thread.started and not self._closed:
            self._thread.start()

    def wake(self) -> None:
        """Let the thread look now, if there is one."""
        self._bell.ring()

    def _threaded(self) -> bool:
        return self._thread.started and not self._closed

    @property
    def ring(self) -> Ring | None:
        """The ring, once it is allocated."""
        return None if self.opened is None else self.opened.end.ring

    @property
    def in_flight(self) -> int:
        """Number of this process's packed transfers that have not ended."""
        return 0 if self.opened is None else self.opened.end.in_flight

    @property
    def begun(self) -> int:
        """Number of those that do not wait for their ``after=``."""
        return 0 if self.opened is None else self.opened.end.begun

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
        side, memory = 1 if reading else 0, max(mine.regions, key=lambda region: region.nbytes)
        start = -(-memory.address // GRAIN) * GRAIN
        most = min(self._slots.nbytes, (memory.address + memory.nbytes - start) // GRAIN * GRAIN)
        outlines = [outline._replace(units=min(outline.units, 1)) for outline in outlines_of(plan)]
        with suppress(KVPlanError):  # a unit that is larger than the region
            cut = Chunks(outlines, most)
            if cut.chunks:
                ids = cut.ids(sources_of(plan), 0, side)
                self._executor(mine.device).prepare(cut.plan(0, side, ids, [mine], mine, start))

    # ---- transfers ---------------------------------------------------------------------------------------------------

    def why_not(self, peer: str, plan: Plan, *, reading: bool) -> str | None:
        """Return why a plan cannot be packed, or None."""
        if self._closed:
            return f"the agent {self._name!r} is closed"
        if self.opened is not None and (why := self.opened.end.refusals.get(peer)) is not None:
            return why
        sources = sources_of(plan)
        if plan.nbytes and not sources:
            return "it does not say what it was made from"
        if too_many(source.program for source in sources):
            return f"it has more than {MOST_PROGRAMS} programs"
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

    def end(self) -> End:
        """Return the end; allocate the ring if there is none.

        Raises:
            KVPlanError: the ring cannot be allocated or registered.
        """
        return self._open().end

    def restarted(self, peer: str) -> bool:
        """Take it that NIXL knows a peer of this name that has died; return whether it did so for packed transfers."""
        if self.opened is None or peer not in self.opened.end.peers:
            return False
        self.opened.end.lost(peer, "it has restarted", dead=True)
        return True

    def met(self, peer: str) -> None:
        """Take a new card of a peer."""
        if self.opened is not None:
            self.opened.end.refusals.pop(peer, None)
        self.start()

    def forget(self, peer: str) -> None:
        """Part from a peer: its transfers fail. NIXL knows it until nothing of it moves any more."""
        if self.opened is not None:
            self.opened.end.lost(peer, "the peer was forgotten, or this agent was closed")

    def close(self, timeout: float) -> None:
        """Part from all peers, and free the ring.

        Raises:
            TransferError: writes into the ring may still move.
        """
        if self.opened is not None:
            self.opened.end.close(timeout)
        self.stop(timeout)
        if self.opened is not None:
            self.opened.end.poll()  # the last call, if the thread has not made it
        with self._lock:
            opened, self.opened = self.opened, None
            if opened is not None:
                opened.reach.close()

    def stop(self, timeout: float) -> None:
        """End the thread; nothing packed moves any more, and the ring stays."""
        self._closed = True
        self._bell.ring()
        self._thread.join(timeout)

    # ---- notes and progress ------------------------------------------------------------------------------------------

    def notes(self) -> list[tuple[str, bytes]]:
        """Return the users' notes that have come since the last call."""
        if self._threaded():
            self.read()
        else:
            self.poll()  # a note comes with the end of its transfer
        return self._inbox.take()

    def poll(self) -> bool:
        """Move everything on that can move now; return whether anything did."""
        if self.opened is not None:
            return self.opened.end.poll()
        self.read()
        return False

    def _serve(self) -> None:
        """Look again and again, with naps, until the close. NIXL's own thread for this takes a whole core."""
        ctypes.CDLL(None).prctl(TIMER_SLACK, ctypes.c_ulong(SLACK_NS), 0, 0, 0)
        found_at, entered = time.monotonic(), False
        while not self._closed:
            if not entered and self.ring is not None:
                entered = True
                enter(self.ring.place.device)
            found, now = self._looked(), time.monotonic()
            if found:
                found_at = now
            since = now - found_at
            if since < SPIN_SECONDS:
                os.sched_yield()  # lets the threads run that gather, scatter, or wait for the interpreter
                continue
            busy = self.opened is not None and self.opened.end.busy
            nap = REST_NAP if self._failed else BUSY_NAP if busy else IDLE_NAP if since < REST_SECONDS else REST_NAP
            if self._bell.wait(nap):
                found_at = time.monotonic()

    def _looked(self) -> bool:
        try:
            found = self.poll()
        except Exception as error:
            if str(error) != self._failed:
                log.exception("the thread that makes progress for NIXL met an error")
            self._failed = str(error) or type(error).__name__
            return False
        self._failed = ""
        return found

    def read(self) -> None:
        """Take the notes that have come: those of the protocol go to the end, and the users' wait for :meth:`notes`."""
        with self._reading:
            for peer, note in self._nixl.notes():
                if not note.startswith(MAGIC):
                    self._inbox.append((peer, note))
                elif self.opened is not None:
                    self.opened.end.take(peer, note)
                else:
                    self._first(peer, note)

    def _first(self, peer: str, note: bytes) -> None:
        """Take a message of packed transfers before there is a ring."""
        with suppress(TransferError):
            message = Message.of(note)
            if message.kind == HELLO:
                try:
                    self.end().take(peer, note)
                except KVPlanError as error:
                    self._nixl.add(peer, Hello.of(message.body).metadata, PACKED)
                    self._nixl.tell(peer, refusal(message.life, str(error)))

    # ---- the ring ----------------------------------------------------------------------------------------------------

    @property
    def ring_device(self) -> str:
        """The device of the ring, or of the one that the first packed transfer would allocate."""
        ring = self.ring
        return self._device if ring is None else ring.place.device

    @property
    def _device(self) -> str:
        """The device for a ring: the GPU of this process's layouts, or the CPU."""
        if self._device_of is not None:
            return self._device_of()
        return min({layout.device for layout in self._nixl.layouts.values()} - {"cpu"}, default="cpu")

    @property
    def _slots(self) -> Slots:
        ring = self.ring
        if ring is not None:  # its slots stay as they are
            return Slots(ring.place.slots, ring.place.slot_nbytes)
        device = self._device
        return self._way.slots or ring_for(device, self._wire(device))

    def _open(self) -> Opened:
        """Return the end; allocate the ring if there is none."""
        if self.opened is not None:
            return self.opened
        with self._lock:
            if self.opened is not None:
                return self.opened
            if self._closed:
                raise TransferError(f"the agent {self._name!r} is closed")
            ring = allocated(self._device, self._slots, ring_pages, smaller=self._way.slots is None)
            memory = ring.memory
            reach = NixlReach(self._nixl.agent(), memory.data_ptr(), memory.shape[1], memory.device)
            try:
                end = End(
                    ring, self._executor(memory.device), reach, self._offer, self.read, notes=self._inbox,
                    threaded=self._threaded, wake=self.wake, tally=self._tally,
                )  # fmt: skip
            except BaseException:
                reach.close()
                raise
            self.opened = Opened(end, reach)
            return self.opened
