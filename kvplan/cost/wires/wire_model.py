"""The time of a transfer over a wire, ``direct`` or ``packed``; the choice of a way, and of the size of a slot."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from kvplan.base.numbers import binary, count_of, duration, percent
from kvplan.cost.wires.crossing import Crossing
from kvplan.cost.wires.wire_profile import MIB, SLOT_SIZES, WireProfile
from kvplan.errors import KVPlanError

WAYS = ("direct", "packed")
# Sizes of a slot within 3 % of the best are alike. Of them, the smallest one is taken with which a transfer needs at
# most a message per 8 MiB, and one more.
ALIKE, ENOUGH = 0.03, 8 * MIB


@dataclass(frozen=True)
class WayCost:
    """The expected cost of one way for one transfer.

    Attributes:
        way: ``"direct"`` or ``"packed"``.
        seconds: seconds from the call until the caller knows the end.
        messages: writes or reads of the wire.
        posting: seconds of the CPU that posts.
    """

    way: str
    seconds: float
    messages: int
    posting: float


@dataclass(frozen=True)
class WireChoice:
    """The way that a transfer takes, and the reason.

    Attributes:
        way: ``"direct"`` or ``"packed"``.
        direct, packed: the expected costs of both ways.
        why: the reason in words, one line.
    """

    way: str
    direct: WayCost
    packed: WayCost
    why: str


def direct_cost(crossing: Crossing, wire: WireProfile) -> WayCost:
    """Predict a transfer with a descriptor for each contiguous piece.

    >>> from kvplan.cost.wires.wire_profile import default_wire
    >>> found = direct_cost(Crossing(64 << 20, 64, 65536, 65536, 64), default_wire())
    >>> found.messages, round(found.seconds * 1e3, 1)
    (65536, 32.8)
    """
    seconds, posting = _direct_seconds(wire, crossing.descriptors, crossing.nbytes)
    return WayCost("direct", seconds, crossing.descriptors, posting)


def _direct_seconds(wire: WireProfile, descriptors: int, nbytes: int) -> tuple[float, float]:
    """Return the seconds of a direct transfer, and of them those that post it."""
    posting = wire.post + descriptors * wire.descriptor
    moving = descriptors * wire.message + nbytes * wire.byte
    return wire.latency + (max(posting, moving) if wire.overlaps else posting + moving), posting


def packed_cost(
    crossing: Crossing, wire: WireProfile, slot_nbytes: int | None = None, *, pull: bool = True
) -> WayCost:  # fmt: skip
    """Predict a transfer in chunks: gather, wire and scatter of several chunks run at the same time.

    Both processes look for messages only now and then, which is the profile's ``start``. The first chunk passes all
    stages one after another. Each further chunk takes as long as the slowest stage, or as
    long as a slot's round trip divided by the number of slots.

    Args:
        crossing: counts of the transfer.
        wire: profile of the wire.
        slot_nbytes: bytes of a slot; by default the profile's. It holds whole units, or a piece of a larger unit.
        pull: whether the receiver asks for the bytes, which takes a latency more.

    Raises:
        KVPlanError: a slot of less than one byte.

    >>> from kvplan.cost.wires.wire_profile import default_wire
    >>> found = packed_cost(Crossing(64 << 20, 64, 65536, 65536, 64), default_wire())
    >>> found.messages, round(found.seconds * 1e3, 1)
    (4, 3.3)
    """
    size = wire.slot_nbytes if slot_nbytes is None else slot_nbytes
    if size < 1:
        raise KVPlanError(f"slot_nbytes is {size}; a slot has at least one byte")
    chunks = _chunks(crossing, size)
    if not chunks:
        return WayCost("packed", 0.0, 0, 0.0)
    nbytes, gathered, scattered = (
        count / chunks for count in (crossing.nbytes, crossing.gather_runs, crossing.scatter_runs)
    )
    gather, scatter = wire.gather.seconds(gathered, nbytes), wire.scatter.seconds(scattered, nbytes)
    post = wire.post + wire.descriptor + wire.chunk
    moves = wire.message + nbytes * (wire.slot_byte or wire.byte)
    # The GPU gathers, the CPU posts and the wire moves, all at once; or the sender's CPU does all, one after another.
    step = max(moves, gather, scatter, post) if wire.overlaps else max(gather + post + moves, scatter + wire.chunk)
    first = gather + post + moves + scatter + wire.chunk
    ring = (first + 2 * wire.latency) / wire.slots
    rest = (chunks - 1) * max(step, ring)
    return WayCost("packed", wire.start + wire.latency * (1 + pull) + first + rest, chunks, chunks * post)


def _chunks(crossing: Crossing, size: int) -> int:
    """Return the slots that are filled. Larger units than a slot are cut."""
    if not crossing.nbytes:
        return 0
    units, unit = crossing.units, max(crossing.unit_nbytes, 1)
    return -(-units // (size // unit)) if unit <= size else units * -(-unit // size)


def best_slot(
    crossing: Crossing, wire: WireProfile, *, pull: bool = True, slot_bytes: Mapping[int, float] | None = None,
    slots: Mapping[int, int] | None = None,
) -> int:  # fmt: skip
    """Return the size of a slot, 1 to 64 MiB, with which a packed transfer takes the least time.

    Sizes within 3 % of the best are alike. Of them, the smallest one is taken with which the transfer needs at most one
    message per 8 MiB, and one more; without such a size, the largest.

    Args:
        crossing: counts of the transfer.
        wire: profile of the wire.
        pull: whether the receiver asks for the bytes.
        slot_bytes: seconds of the wire for each byte of a slot, by its size, if they differ. Only these sizes count.
        slots: slots of a ring that its only peer may write, by their size, if they differ.

    >>> from kvplan.cost.wires.wire_profile import default_wire
    >>> best_slot(Crossing(4 << 30, 4096, 1 << 20, 1 << 20, 4096), default_wire()) >> 20
    16
    """
    wires = dict.fromkeys(SLOT_SIZES, wire)
    if slot_bytes is not None:
        wires = {size: replace(wire, slot_byte=byte) for size, byte in sorted(slot_bytes.items())}
    if slots is not None:
        wires = {size: replace(one, slots=slots.get(size, one.slots)) for size, one in wires.items()}
    costs = {size: packed_cost(crossing, one, size, pull=pull) for size, one in wires.items()}
    least = min(cost.seconds for cost in costs.values())
    alike = [size for size, cost in costs.items() if cost.seconds <= least * (1 + ALIKE)]
    most = crossing.nbytes // ENOUGH + 1
    return next((size for size in alike if costs[size].messages <= most), alike[-1])


def choose_way(
    crossing: Crossing, wire: WireProfile, *, pull: bool = True, slot_nbytes: int | None = None
) -> WireChoice:  # fmt: skip
    """Choose between a descriptor for each piece and packing, and give the reason.

    Args:
        crossing: counts of the transfer.
        wire: profile of the wire.
        pull: whether the receiver asks for the bytes.
        slot_nbytes: bytes of a slot, if the ring exists already; by default the profile's.

    >>> from kvplan.cost.wires.wire_profile import default_wire
    >>> made = choose_way(Crossing(64 << 20, 64, 65536, 65536, 64), default_wire())
    >>> print(made.why)
    packed takes 3.28 ms in 4 messages; direct takes 32.8 ms, of which 100 % post 65,536 descriptors of 1 KiB
    >>> print(choose_way(Crossing(1 << 16, 1, 1, 1, 1), default_wire()).why)
    direct takes 10.5 us for 1 descriptor of 64 KiB; packed takes 1.92 ms, with a gather and a scatter besides
    """
    direct, packed = direct_cost(crossing, wire), packed_cost(crossing, wire, slot_nbytes, pull=pull)
    way = "packed" if packed.seconds < direct.seconds else "direct"
    return WireChoice(way, direct, packed, _why(way, crossing, direct, packed))


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
    return bool(nbytes) and _direct_seconds(wire, pieces, nbytes)[0] <= begins


def _why(way: str, crossing: Crossing, direct: WayCost, packed: WayCost) -> str:
    if not crossing.nbytes:
        return "no byte moves"
    pieces = f"{count_of(crossing.descriptors, 'descriptor')} of {binary(crossing.descriptor_nbytes)}"
    if way == "direct":
        packing = f"packed takes {duration(packed.seconds)}, with a gather and a scatter besides"
        return f"direct takes {duration(direct.seconds)} for {pieces}; {packing}"
    share = percent(min(round(direct.posting / direct.seconds, 2), 1.0))
    return (f"packed takes {duration(packed.seconds)} in {count_of(packed.messages, 'message')}; direct takes "
            f"{duration(direct.seconds)}, of which {share} post {pieces}")  # fmt: skip
