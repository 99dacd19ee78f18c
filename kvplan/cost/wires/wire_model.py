"""The time of a transfer over a wire, ``direct`` or ``packed``; the choice of a way, and of the size of a slot."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from kvplan.base.numbers import binary, count_of, duration, percent
from kvplan.cost.wires.wire_profile import MIB, WireProfile
from kvplan.plan.packing import sections_of
from kvplan.plan.plan import Plan

# Sizes of a slot within 3 % of the best are alike. Of them, the smallest one is taken with which a transfer needs at
# most a message per 8 MiB, and one more.
ALIKE, ENOUGH = 0.03, 8 * MIB


class Crossing(NamedTuple):
    """The counts of one transfer between two processes, which the model of a wire reads.

    Attributes:
        nbytes: bytes that move.
        units: units that move; a large unit is cut, and counts as several.
        descriptors: messages of a transfer with a descriptor each. A strided row of NIXL counts as often as it repeats.
        gather_runs: contiguous copies from the source to the slots.
        scatter_runs: contiguous copies from the slots to the destination.
    """

    nbytes: int
    units: int
    descriptors: int
    gather_runs: int
    scatter_runs: int


def crossing_of(plan: Plan, most: int = 16 * MIB) -> Crossing:
    """Count a plan's descriptors, and the runs of its two halves if it is packed.

    Args:
        plan: a plan between two processes, or of this process.
        most: bytes of a slot; larger units than a sixteenth of it are cut, and count as several.

    >>> import kvplan, numpy as np
    >>> gpu = kvplan.KVLayout.from_tensors("layer block token dim", np.zeros((4, 8, 16, 64), np.int8))
    >>> host = kvplan.KVLayout.from_tensors("block layer token dim", np.zeros((8, 4, 16, 64), np.int8))
    >>> crossing_of(kvplan.compile(gpu, host).plan([1, 3], [3, 5]))
    Crossing(nbytes=8192, units=2, descriptors=8, gather_runs=8, scatter_runs=2)
    """
    units = gather = scatter = descriptors = 0
    for part in plan.parts:
        count, sections = int(part.units.shape[1]), sections_of(part.group, most)
        units += count * len(sections)
        gather += count * sum(int(one.src.packed.shape[1]) for one in sections)
        scatter += count * sum(int(one.dst.packed.shape[1]) for one in sections)
        descriptors += count * part.group.packed.shape[1]
    if any(part.group.chainable for part in plan.parts):  # units that touch share a descriptor
        descriptors = plan.descriptors().size.size
    return Crossing(plan.nbytes, units, descriptors, gather, scatter)


class WayCost(NamedTuple):
    """The expected cost of one way for one transfer.

    Attributes:
        seconds: seconds from the call until the caller knows the end.
        messages: writes or reads of the wire.
        posting: seconds of the CPU that posts.
    """

    seconds: float
    messages: int
    posting: float


class WireChoice(NamedTuple):
    """The way that a transfer takes, ``"direct"`` or ``"packed"``, and the reason in words, one line."""

    way: str
    why: str


def direct_cost(nbytes: int, descriptors: int, wire: WireProfile) -> WayCost:
    """Predict a transfer of so many bytes with a descriptor for each contiguous piece.

    >>> from kvplan.cost.wires.wire_profile import default_wire
    >>> found = direct_cost(64 << 20, 65536, default_wire())
    >>> found.messages, round(found.seconds * 1e3, 1)
    (65536, 32.8)
    """
    posting = wire.post + descriptors * wire.descriptor
    moving = descriptors * wire.message + nbytes * wire.byte
    return WayCost(wire.latency + (max(posting, moving) if wire.overlaps else posting + moving), descriptors, posting)


def packed_cost(crossing: Crossing, wire: WireProfile, *, pull: bool = True) -> WayCost:
    """Predict a transfer in chunks: gather, wire and scatter of several chunks run at the same time.

    Both processes look for messages only now and then, which is the profile's ``start``. The first chunk passes all
    stages one after another. Each further chunk takes as long as the slowest stage, or as
    long as a slot's round trip divided by the number of slots.

    Args:
        crossing: counts of the transfer.
        wire: profile of the wire. Its slots hold whole units, or a piece of a larger unit.
        pull: whether the receiver asks for the bytes, which takes a latency more.

    >>> from kvplan.cost.wires.wire_profile import default_wire
    >>> found = packed_cost(Crossing(64 << 20, 64, 65536, 65536, 64), default_wire())
    >>> found.messages, round(found.seconds * 1e3, 1)
    (4, 3.3)
    """
    if not crossing.nbytes:
        return WayCost(0.0, 0, 0.0)
    unit, size = -(-crossing.nbytes // crossing.units), wire.slot_nbytes
    chunks = -(-crossing.units // (size // unit)) if unit <= size else crossing.units * -(-unit // size)
    nbytes = crossing.nbytes / chunks
    gather = wire.gather.seconds(crossing.gather_runs / chunks, nbytes)
    scatter = wire.scatter.seconds(crossing.scatter_runs / chunks, nbytes)
    post = wire.post + wire.descriptor + wire.chunk
    moves = wire.message + nbytes * (wire.slot_byte or wire.byte)
    # The GPU gathers, the CPU posts and the wire moves, all at once; or the sender's CPU does all, one after another.
    step = max(moves, gather, scatter, post) if wire.overlaps else max(gather + post + moves, scatter + wire.chunk)
    first = gather + post + moves + scatter + wire.chunk
    ring = (first + 2 * wire.latency) / wire.slots
    rest = (chunks - 1) * max(step, ring)
    return WayCost(wire.start + wire.latency * (1 + pull) + first + rest, chunks, chunks * post)


def best_slot(crossing: Crossing, wires: Iterable[WireProfile]) -> WireProfile:
    """Return the profile with the size of a slot with which a packed transfer takes the least time.

    Sizes within 3 % of the best are alike. Of them, the smallest one is taken with which the transfer needs at most one
    message per 8 MiB, and one more; without such a size, the largest.

    Args:
        crossing: counts of the transfer.
        wires: profiles of a wire that differ in their slots, in order of the slots' size.

    >>> from dataclasses import replace
    >>> from kvplan.cost.wires.wire_profile import default_wire
    >>> wires = [replace(default_wire(), slot_nbytes=MIB << power) for power in range(7)]
    >>> best_slot(Crossing(4 << 30, 4096, 1 << 20, 1 << 20, 4096), wires).slot_nbytes >> 20
    16
    """
    costs = [(wire, packed_cost(crossing, wire)) for wire in wires]
    least = min(cost.seconds for _, cost in costs)
    alike = [(wire, cost) for wire, cost in costs if cost.seconds <= least * (1 + ALIKE)]
    most = crossing.nbytes // ENOUGH + 1
    return next((wire for wire, cost in alike if cost.messages <= most), alike[-1][0])


def choose_way(crossing: Crossing, wire: WireProfile, *, pull: bool = True) -> WireChoice:
    """Choose between a descriptor for each piece and packing, and give the reason.

    Args:
        crossing: counts of the transfer.
        wire: profile of the wire.
        pull: whether the receiver asks for the bytes.

    >>> from kvplan.cost.wires.wire_profile import default_wire
    >>> print(choose_way(Crossing(64 << 20, 64, 65536, 65536, 64), default_wire()).why)
    packed takes 3.28 ms in 4 messages; direct takes 32.8 ms, of which 100 % post 65,536 descriptors of 1 KiB
    >>> print(choose_way(Crossing(1 << 16, 1, 1, 1, 1), default_wire()).why)
    direct takes 10.5 us for 1 descriptor of 64 KiB; packed takes 1.92 ms, with a gather and a scatter besides
    """
    direct = direct_cost(crossing.nbytes, crossing.descriptors, wire)
    packed = packed_cost(crossing, wire, pull=pull)
    times = f"direct takes {duration(direct.seconds)}", f"packed takes {duration(packed.seconds)}"
    each = binary(crossing.nbytes // max(crossing.descriptors, 1))
    pieces = f"{count_of(crossing.descriptors, 'descriptor')} of {each}"
    if packed.seconds >= direct.seconds:
        return WireChoice("direct", f"{times[0]} for {pieces}; {times[1]}, with a gather and a scatter besides")
    share = percent(min(round(direct.posting / direct.seconds, 2), 1.0))
    messages = count_of(packed.messages, "message")
    return WireChoice("packed", f"{times[1]} in {messages}; {times[0]}, of which {share} post {pieces}")


def direct_at_once(nbytes: int, pieces: int, wire: WireProfile, *, pull: bool = True) -> bool:
    """Return whether a descriptor for each piece has moved all before a packed transfer would move its first byte.

    Then nothing else about the plan matters for the choice.

    Args:
        nbytes: bytes of the plan.
        pieces: its contiguous pieces, at most.
        wire: profile of the wire.
        pull: whether the receiver asks for the bytes.

    >>> from kvplan.cost.wires.wire_profile import default_wire
    >>> [direct_at_once(pieces << 10, pieces, default_wire()) for pieces in (16, 65536)]
    [True, False]
    """
    begins = wire.start + wire.latency * (1 + pull)
    return bool(nbytes) and direct_cost(nbytes, pieces, wire).seconds <= begins
