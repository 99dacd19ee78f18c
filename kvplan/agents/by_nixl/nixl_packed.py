"""The packed way of the transport ``nixl``: when it is taken, its ring, and the thread that makes progress."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

from kvplan.agents.by_nixl.nixl_end import NixlEnd
from kvplan.agents.packed.end import End, PackedWay
from kvplan.agents.packed.line import MOST_PROGRAMS
from kvplan.agents.packed.ring import Slots, ring_for
from kvplan.base.process import cached_property
from kvplan.base.values import quoted
from kvplan.cost.wire import WireChoice, WireProfile, choose_way, crossing_of, direct_at_once, find_wire, wire_name
from kvplan.errors import KVPlanError
from kvplan.layout.kvlayout import KVLayout
from kvplan.plan.chunks import Chunks, outlines_of, sources_of
from kvplan.plan.descriptors import memory_of
from kvplan.plan.packing import GRAIN
from kvplan.plan.plan import Plan

__all__ = ["PACKED_VERSION", "NixlPacked", "PackedWay", "checked_progress"]

PACKED_VERSION = 6  # in the card of an agent that takes packed transfers


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


class NixlPacked(End):
    """This process's end of packed transfers by NIXL; see :class:`.packed.end.End`."""

    _transport: NixlEnd

    @cached_property
    def _profiles(self) -> dict[str, WireProfile]:  # by NIXL's name of the memory
        return {}

    # ---- peers -------------------------------------------------------------------------------------------------------

    def serve_peers(self) -> int:
        """Take requests of peers from now on; return the version for the card, or 0 if it takes none."""
        if self.closed:
            return 0
        self.start()
        return PACKED_VERSION

    def met(self, peer: str) -> None:
        """Take a new card of a peer."""
        self.refusals.pop(peer, None)
        self.start()

    # ---- the choice of a way -----------------------------------------------------------------------------------------

    def why_not(self, peer: str, plan: Plan, *, reading: bool) -> str | None:
        """Return why a plan cannot be packed, or None."""
        if self.closed:
            return f"the agent {self.name!r} is closed"
        if (why := self.refusals.get(peer)) is not None:
            return why
        sources = sources_of(plan)
        if plan.nbytes and not sources:
            return "it does not say what it was made from"
        if len({id(source.program) for source in sources}) > MOST_PROGRAMS:
            return f"it has more than {MOST_PROGRAMS} programs"
        for k, where in ((1 if reading else 0, "here"), (0 if reading else 1, "there")):
            devices = {pair[k].device for pair in plan.layouts}
            if len(devices) > 1:
                return f"its memory {where} is on {' and '.join(sorted(devices))}, and a ring is on one device"
        own, ring = plan.layouts[0][1 if reading else 0].device, self._place[0]
        if own not in ("cpu", ring):
            return f"its memory here is on {own}, and the ring on {ring}"
        return None

    def choose(self, plan: Plan, *, reading: bool) -> WireChoice:
        """Return the faster way of a plan that can be packed, by a model of the wire."""
        (_, nbytes), wire = self._place, self._wire_of(plan, reading=reading)
        return choose_way(crossing_of(plan, most=nbytes), replace(wire, slot_nbytes=nbytes), pull=reading)

    def direct_at_once(self, plan: Plan, *, reading: bool) -> bool:
        """Return whether a descriptor for each piece of a small plan is faster than a packed transfer begins.

        Other plans need :meth:`choose`, which takes longer than a block moves.
        """
        pieces = sum(part.copies for part in plan.parts)
        return direct_at_once(plan.nbytes, pieces, self._wire_of(plan, reading=reading), pull=reading)

    def _wire_of(self, plan: Plan, *, reading: bool) -> WireProfile:
        return self._profile(plan.layouts[0][1 if reading else 0].device if plan.layouts else "cpu")

    def _profile(self, device: str) -> WireProfile:
        """Return the profile of the wire between memory like a device's."""
        memory = memory_of(device, "the memory")[0]
        if memory not in self._profiles:
            self._profiles[memory] = find_wire(wire_name(self._transport.backends[0]), memory)
        return self._profiles[memory]

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
        most = min(self._place[1], (memory.address + memory.nbytes - start) // GRAIN * GRAIN)
        outlines = [outline._replace(units=min(outline.units, 1)) for outline in outlines_of(plan)]
        with suppress(KVPlanError):  # a unit that is larger than the region
            cut = Chunks(outlines, most)
            if cut.chunks:
                ids = cut.ids(sources_of(plan), 0, side)
                self._executor(mine.device).prepare(cut.plan(0, side, ids, [mine], mine, start))

    # ---- the ring ----------------------------------------------------------------------------------------------------

    def device(self) -> str:
        """Return the GPU of this process's layouts, or the CPU."""
        layouts = *self._transport.layouts.values(), *self._offer().layouts
        return min({layout.device for layout in layouts} - {"cpu"}, default="cpu")

    def slots(self) -> Slots:
        """Return those that were asked for, or a ring that fits its device."""
        return self._way.slots or ring_for(device := self.device(), self._profile(device))

    @property
    def _place(self) -> tuple[str, int]:
        """The device of the ring, and the bytes of a slot, or those that it would have."""
        if self.ring is None:
            return self.device(), self.slots().nbytes
        return self.ring.place.device, self.ring.place.slot_nbytes
