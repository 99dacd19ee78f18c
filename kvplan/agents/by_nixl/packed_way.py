"""The options of packed transfers: the ring of an agent, and who makes progress."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from kvplan.agents.packed.pack_sharing import most_of_a_peer, slots_to_gather
from kvplan.agents.packed.slot_ring import ALIGNMENT, MOST_SLOTS
from kvplan.base.integers import integer
from kvplan.base.quoting import quoted
from kvplan.cost.wires.wire_profile import WireProfile
from kvplan.errors import KVPlanError, PathError
from kvplan.plan.row_plans import Memory

LEAST_SLOT = 4096  # bytes


class Slots(NamedTuple):
    """The ring of an agent.

    Attributes:
        number: number of its slots.
        nbytes: bytes of a slot.
    """

    number: int
    nbytes: int


HOST_SLOTS, GPU_SLOTS = Slots(24, 4 << 20), Slots(16, 32 << 20)
LEAST_GPU_SLOT = 4 << 20  # bytes of a slot of a default ring, where a GPU has little memory left
HOST_RING, GPU_RING = 128 << 20, 512 << 20  # most bytes of a ring whose slots have the size of a profile
LEAST_HOST_SLOTS, LEAST_GPU_SLOTS = 16, 8  # of such a ring, so that several peers share it


class PackedWay(NamedTuple):
    """How an agent takes packed transfers.

    Attributes:
        slots: its ring; None for one that fits its device.
        threaded: whether a thread makes progress; otherwise :meth:`kvplan.Agent.poll` does.
        driven: whether NIXL has a thread of its own, too.
    """

    slots: Slots | None = None
    threaded: bool = True
    driven: bool = False


def ring_for(device: str, wire: WireProfile) -> Slots:
    """Return the ring of an agent that was given none: with slots of the size that the wire's calibration has found.

    Args:
        device: device of the ring.
        wire: profile of the wire.

    >>> from dataclasses import replace
    >>> from kvplan.cost.wires.wire_profile import default_wire
    >>> ring_for("cuda:0", default_wire())
    Slots(number=16, nbytes=33554432)
    >>> ring_for("cuda:0", replace(default_wire(), how="calibrated", slot_nbytes=64 << 20))
    Slots(number=8, nbytes=67108864)
    >>> ring_for("cuda:0", replace(default_wire(), how="calibrated", slot_nbytes=1 << 20))
    Slots(number=16, nbytes=1048576)
    """
    host = device == "cpu"
    usual, most, least = (HOST_SLOTS, HOST_RING, LEAST_HOST_SLOTS) if host else (GPU_SLOTS, GPU_RING, LEAST_GPU_SLOTS)
    if wire.how != "calibrated":
        return usual
    nbytes = min(max(wire.slot_nbytes // ALIGNMENT * ALIGNMENT, LEAST_SLOT), most // least)
    return Slots(min(usual.number, most // nbytes), nbytes)


def slots_of_a_peer(ring: Slots) -> int:
    """Return the most slots of a ring that its only peer may write: neither those of gathers, nor the last one.

    >>> [slots_of_a_peer(Slots(number, 64 << 20)) for number in (8, 16, 24)]
    [4, 10, 15]
    """
    return most_of_a_peer(ring.number - slots_to_gather(ring.number))


def allocated(
    device: str, slots: Slots, pages: Callable[[int, str], Memory], *, smaller: bool
) -> tuple[Slots, Memory]:  # fmt: skip
    """Allocate a ring; on a GPU that has not so much memory left, one with smaller slots if that is allowed.

    Args:
        device: device of the ring.
        slots: its slots.
        pages: allocates bytes on a device.
        smaller: whether slots may be smaller; they are halved down to 4 MiB.

    Raises:
        KVPlanError: there is no memory.
    """
    while True:
        try:
            return slots, pages(slots.number * slots.nbytes, device)
        except PathError:
            if not smaller or slots.nbytes // 2 < LEAST_GPU_SLOT:
                raise
            slots = slots._replace(nbytes=slots.nbytes // 2 // ALIGNMENT * ALIGNMENT)


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


def checked_slots(slots: object) -> Slots | None:
    """Return a ring; raise KVPlanError if it is not (slots, bytes of a slot).

    >>> checked_slots((8, 1 << 20))
    Slots(number=8, nbytes=1048576)
    """
    if slots is None:
        return None
    if not isinstance(slots, tuple) or len(slots) != 2:
        raise KVPlanError(f"slots is {quoted(slots)}; give (number of slots, bytes of a slot), or None")
    right = "a ring has from 2 to 65,536 slots"
    number = integer("slots[0]", slots[0], least=2, most=MOST_SLOTS, right=right, error=KVPlanError)
    right = f"a slot has at least {LEAST_SLOT:,} bytes"
    nbytes = integer("slots[1]", slots[1], least=LEAST_SLOT, right=right, error=KVPlanError)
    if nbytes % ALIGNMENT:
        raise KVPlanError(f"slots[1] is {nbytes}; the bytes of a slot are a multiple of {ALIGNMENT}")
    return Slots(number, nbytes)
