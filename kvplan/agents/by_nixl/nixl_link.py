"""The connection to a peer through NIXL, by both ways: packed, or with a descriptor for each piece: direct."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from kvplan.agents.by_nixl.nixl_end import DONE, MOVING, NixlEnd, in_words, spans_of
from kvplan.agents.connection import Loop, Watcher
from kvplan.agents.packed.end import End
from kvplan.agents.packed.ring import Slots, ring_for
from kvplan.agents.peer_transfer import BOUND, LatchedTransfer, Order, question
from kvplan.base.process import check_process
from kvplan.cost.wire import WireChoice, WireProfile, choose_way, crossing_of, direct_at_once, find_wire, wire_name
from kvplan.errors import KVPlanError, PathError, TransferError
from kvplan.execute.stats import Tally
from kvplan.execute.transfer import TransferResult
from kvplan.layout.kvlayout import KVLayout
from kvplan.plan.chunks import Chunks, outlines_of, sources_of
from kvplan.plan.descriptors import memory_of, nixl_lists
from kvplan.plan.packing import GRAIN
from kvplan.plan.plan import Plan

PACKED_VERSION = 7  # in the card of an agent that takes packed transfers; MAGIC has it, too
WAIT_SECONDS = 50e-6  # between two looks of a caller that waits
LOOK_SECONDS = 2e-3  # between two looks of the agent's thread

log = logging.getLogger("kvplan.agents")


class NixlPacked(End):
    """This process's end of packed transfers by NIXL; see :class:`.packed.end.End`."""

    def serve_peers(self) -> int:
        """Take requests of peers from now on; return the version for the card, or 0 if it takes none."""
        self.start()
        return 0 if self.closed else PACKED_VERSION

    def met(self, peer: str) -> None:
        """Take a new card of a peer."""
        self.refusals.pop(peer, None)
        self.start()

    # ---- the choice of a way -----------------------------------------------------------------------------------------

    def why_not(self, peer: str, plan: Plan, *, reading: bool) -> str | None:
        """Return why a plan cannot be packed, or None."""
        if self.closed:
            return f"the agent {self.name!r} is closed"
        if peer in self.refusals:
            return self.refusals[peer]
        if plan.nbytes and not sources_of(plan):
            return "it does not say what it was made from"
        here, there = ({pair[side].device for pair in plan.layouts} for side in (reading, not reading))
        if len(here) > 1 or len(there) > 1:
            return f"its memory is on {' and '.join(sorted(here | there))}, and a ring is on one device"
        if not here <= {"cpu", self._place[0]}:
            return f"its memory here is on {here.pop()}, and the ring on {self._place[0]}"
        return None

    def choose(self, plan: Plan, *, reading: bool) -> WireChoice:
        """Return the faster way of a plan that can be packed, by a model of the wire."""
        (_, nbytes), wire = self._place, self._wire(plan, reading=reading)
        return choose_way(crossing_of(plan, most=nbytes), replace(wire, slot_nbytes=nbytes), pull=reading)

    def direct_at_once(self, plan: Plan, *, reading: bool) -> bool:
        """Return whether a descriptor for each piece of a small plan is faster than a packed transfer begins.

        Other plans need :meth:`choose`, which takes longer than a block moves.
        """
        pieces = sum(part.copies for part in plan.parts)
        return direct_at_once(plan.nbytes, pieces, self._wire(plan, reading=reading), pull=reading)

    def _wire(self, plan: Plan, *, reading: bool) -> WireProfile:
        return self._profile(plan.layouts[0][reading].device if plan.layouts else "cpu")

    def _profile(self, device: str) -> WireProfile:
        """Return the profile of the wire between memory like a device's."""
        memory = memory_of(device, "the memory")[0]
        if memory not in self.profiles:
            self.profiles[memory] = find_wire(wire_name(self.transport.backends[0]), memory)
        return self.profiles[memory]

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
        side, memory = int(reading), max(mine.regions, key=lambda region: region.nbytes)
        start = -(-memory.address // GRAIN) * GRAIN
        most = min(self._place[1], (memory.address + memory.nbytes - start) // GRAIN * GRAIN)
        outlines = [outline._replace(units=min(outline.units, 1)) for outline in outlines_of(plan)]
        with suppress(KVPlanError):  # a unit that is larger than the region
            cut = Chunks(outlines, most)
            if cut.chunks:
                ids = cut.ids(sources_of(plan), 0, side)
                self.executor(mine.device).prepare(cut.plan(0, side, ids, [mine], mine, start))

    # ---- the ring ----------------------------------------------------------------------------------------------------

    def device(self) -> str:
        """Return the GPU of this process's layouts, or the CPU."""
        layouts = *self.transport.layouts.values(), *self.offer().layouts
        return min({layout.device for layout in layouts} - {"cpu"}, default="cpu")

    def slots(self) -> Slots:
        """Return those that were asked for, or a ring that fits its device."""
        return self.asked or ring_for(device := self.device(), self._profile(device))

    @property
    def _place(self) -> tuple[str, int]:
        """The device of the ring, and the bytes of a slot, or those that it would have."""
        if self.ring is None:
            return self.device(), self.slots().nbytes
        return self.ring.place.device, self.ring.place.slot_nbytes


class DirectTransfer(LatchedTransfer):
    """A direct transfer by NIXL, which also moves on if nobody looks. :meth:`kvplan.Peer.submit` returns it.

    The agent's thread, and calls that wait, notice that the bytes have moved, or that it has failed; the ``seconds`` of
    the result end there. An error says what the destination holds.

    Args:
        link: the connection.
        order: the arguments of the submit. NIXL sends the note.
        tally: sums to which it is added.
    """

    _handle: Any = None  # NIXL's
    _posted = 0.0  # when it was posted; 0 while it waits for its ``after=``
    _descriptors = 0

    def __init__(self, link: NixlLink, order: Order, tally: Tally) -> None:
        super().__init__(order, tally)
        self._link, self._end = link, link.own
        self._gate = None if order.after is None else question(order.after)

    def done(self) -> bool:
        """Return whether it has ended; see :meth:`kvplan.Transfer.done`."""
        check_process(self._generation)
        passes = self.ended or self._passes()
        with self._end.lock:
            if not self.ended:
                self._look(passes)
        return self.ended

    def synchronize(self, timeout: float | None = None) -> None:
        """Block until it has ended; see :meth:`kvplan.Transfer.synchronize`."""
        started = time.monotonic()
        while not self.done():
            if timeout is not None and time.monotonic() - started > timeout:
                raise self._late(timeout)
            time.sleep(WAIT_SECONDS if self._posted else LOOK_SECONDS)
        self._raise()

    def cancel(self) -> bool:
        """Cancel it if it was not posted; see :meth:`kvplan.Transfer.cancel`. Its note is not sent."""
        with self._end.lock:
            if not self.ended and not self._posted:
                self.cancelled = True
                self.end()
        return self.cancelled

    def end(self, why: str = "", result: TransferResult | None = None) -> None:
        """End it, unless it has ended: with a result, or for a reason. The caller holds the lock of NIXL."""
        if not self.ended:
            held = f"{'the destination' if self.order.reading else 'the peer'} may hold a part of the bytes"
            self._end_as(result, why, held if self._posted else "it had not begun, and nothing was moved")
            self._gate = None
            if self._handle is not None:
                self._end.release(self._handle, memory=self.plan)
            self._link.flying.discard(self)
            self._over.set()

    def _passes(self) -> object:
        """Return whether it need not wait any more, or the error of its ``after=``.

        The caller does not hold the lock of NIXL: a packed transfer that is asked may move on, and then takes it.
        """
        gate = self._gate
        try:
            return gate is None or gate()
        except Exception as error:
            return error

    def _look(self, passes: object) -> None:
        """Post it if it need not wait any more, or ask NIXL for its state."""
        try:
            if isinstance(passes, Exception):
                raise passes
            if not passes:
                state = MOVING
            elif self._posted:
                state = self._end.nixl.check_xfer_state(self._handle)
            else:
                self._gate, state = None, self._post()
        except Exception as error:  # any error is the transfer's
            waited = "" if self._posted else "its after= failed, or it was not posted: "
            self.end(f"{waited}{in_words(error)}; if the peer is gone, meet() its new card and plan again")
            return
        if state == DONE:
            seconds = time.perf_counter() - self._posted
            self.end(result=TransferResult(self.plan.nbytes, seconds, "nixl", self._descriptors, 1))
        elif state != MOVING:
            self.end(f"NIXL reports the state {state}; if the peer is gone, meet() its new card and plan again")
        elif self.until is not None and time.monotonic() > self.until:
            self.end(f"it did not end within its deadline of {self.order.bound} seconds")

    def _post(self) -> str:
        nixl, order = self._end.nixl, self.order
        if order.deadline is BOUND:
            self.until = time.monotonic() + (order.bound or 0.0)
        if not self.plan.nbytes:
            self._posted = time.perf_counter()
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
        self._posted = time.perf_counter()
        return str(nixl.transfer(self._handle))


class NixlLink(Watcher):
    """The connection to a peer through NIXL.

    Args:
        end: this process's end of NIXL.
        name: name of the peer.
        part: NIXL's part of the peer's card: its metadata, and the version by which it packs, if it does.
        packed: this process's packed way, or None.
        loop: the service thread.
        parted: called at its end.

    Attributes:
        own: this process's end of NIXL.
        flying: direct transfers in flight.
        why: why no transfer is accepted any more; None while it is open.

    Raises:
        KVPlanError: NIXL cannot be used.
        TransferError: NIXL does not accept the metadata of the card.
    """

    why: str | None = None
    _ringless = False

    def __init__(
        self, end: NixlEnd, name: str, part: dict[str, Any], packed: NixlPacked | None, loop: Loop,
        parted: Callable[[NixlLink], None],
    ) -> None:  # fmt: skip
        self.own, self._name, self._packed, self._loop, self._parted = end.open(), name, packed, loop, parted
        self._version = part.get("packed")
        self.flying: set[DirectTransfer] = set()
        restarted = end.meet(name, bytes.fromhex(part["metadata"]))
        if packed is not None:
            if restarted:
                packed.part(name, "it has restarted", over=True)
            packed.met(name)
        loop.add(self)

    def why_not_packed(self, plan: Plan, *, reading: bool) -> str | None:
        """Return why a plan cannot be packed, or None."""
        if self._packed is None:
            return "this agent packs nothing: it was made with a nixl_agent of the caller's, and without progress="
        if not self._version:
            return f"the card of {self._name!r} offers no packed transfers"
        if self._version != PACKED_VERSION:
            return f"{self._name!r} packs by version {self._version}, and this kvplan by {PACKED_VERSION}"
        return self._packed.why_not(self._name, plan, reading=reading)

    def submit(self, order: Order, way: str, tally: Tally) -> LatchedTransfer:
        """Begin a transfer by a way.

        Raises:
            PathError: the plan cannot be packed, or this process's side is not registered.
            TransferError: the peer was forgotten.
        """
        self._check_open()
        own, packed, plan, reading = self.own, self._packed, order.plan, order.reading
        if way == "auto" and (packed is None or packed.direct_at_once(plan, reading=reading)):
            way = "direct"
        if way != "direct" and (why := self.why_not_packed(plan, reading=reading)) is not None:
            if way == "packed":
                raise PathError(f"{plan!r} cannot be packed: {why}")
            way = "direct"
        if way != "direct" and packed is not None:
            choice = None if way == "packed" else packed.choose(plan, reading=reading)
            log.debug("%r goes by NIXL: %s", plan, choice or "packed, as asked for")
            if choice is None or (choice.way == "packed" and self._has_ring(packed)):
                return packed.end().submit(order)
        if not spans_of(pair[reading] for pair in plan.layouts) <= own.spans:
            raise PathError(
                f"{'dst' if reading else 'src'} of {plan!r} is neither a layout that {own.name!r} registered nor a "
                "part of one; compile with agent.layouts on this side"
            )
        transfer = DirectTransfer(self, order, tally)
        with own.calling("moves nothing"):
            self._check_open()  # again: from now on, leave() finds the transfer
            self.flying.add(transfer)
        transfer.done()
        self._loop.wake()
        return transfer

    def _has_ring(self, packed: NixlPacked) -> bool:
        """Return whether there is a ring, or room for one, which a full GPU is asked once."""
        if not self._ringless:
            try:
                packed.end()
            except KVPlanError as error:
                self._ringless = True
                log.info("transfers with %s go direct, since %s has no ring: %s", self._name, self.own.name, error)
        return not self._ringless

    def send(self, note: bytes) -> None:
        """Send a note by itself."""
        self._check_open()
        self.own.tell(self._name, note)

    def _check_open(self) -> None:
        if self.why is not None:
            raise TransferError(f"no transfer with {self._name!r}: {self.why}; meet it again, by a new card")

    @property
    def in_flight(self) -> int:
        """Number of direct transfers in flight."""
        return len(self.flying)

    def waits(self) -> str:
        """Return what has not ended, for a message."""
        return f"{len(self.flying)} transfers with {self._name!r} by NIXL have not ended"

    def due(self) -> float | None:
        """Return when to look for ends again."""
        return time.monotonic() + LOOK_SECONDS if self.flying else None

    def serve(self) -> None:
        """Look for ends."""
        for transfer in list(self.flying):
            transfer.done()

    def leave(self) -> None:
        """Remove the peer from NIXL; transfers that have not ended fail."""
        if self.why is None:
            self.why = "the peer was forgotten, or this agent was closed"
            self._loop.remove(self)
            if self._packed is not None:
                self._packed.part(self._name, self.why)
            with self.own.lock:
                for transfer in list(self.flying):
                    transfer.end(self.why)
                self.own.drop(self._name)
            self._parted(self)
