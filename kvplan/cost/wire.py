"""Wires between two processes: profiles of what they cost, and the time of a transfer, ``direct`` or ``packed``.

The profile of a wire is a chosen file, the user's own, or a guess: ``dram.json`` and ``vram.json``. The guess for GPU
memory is of a NIC of 400 Gb/s; that for host memory of UCX over shared memory on a small machine, where the CPU that
posts moves the bytes. What kvplan's own protocol takes in them was measured on small machines and an H200.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

from kvplan.base.numbers import binary, count_of, duration, percent
from kvplan.cost.profile import PROFILES, values_of
from kvplan.cost.store import folder, read_as, slug
from kvplan.errors import KVPlanError
from kvplan.plan.packing import sections_of
from kvplan.plan.plan import Plan

SCHEMA, VERSION = "kvplan.wire-profile", 2
MIB = 1 << 20
# Environment variable: the file of the profile of every wire of this process, instead of its own profiles.
CHOSEN = "KVPLAN_WIRE"
_log = logging.getLogger("kvplan")
# Sizes of a slot within 3 % of the best are alike. Of them, the smallest one is taken with which a transfer needs at
# most a message per 8 MiB, and one more.
ALIKE, ENOUGH = 0.03, 8 * MIB


@dataclass(frozen=True)
class CopyCosts:
    """The costs of gathering units into a slot, or of scattering them from it.

    Attributes:
        fixed: seconds for each slot, until the copies begin and until their end is known.
        run: seconds for each contiguous run.
        byte: seconds for each byte.

    >>> round(CopyCosts(1e-5, 1e-9, 1e-12).seconds(runs=1000, nbytes=1_000_000) * 1e6, 3)
    12.0
    """

    fixed: float
    run: float
    byte: float

    def seconds(self, runs: float, nbytes: float) -> float:
        """Return the seconds of one slot's copies."""
        return self.fixed + runs * self.run + nbytes * self.byte


@dataclass(frozen=True)
class WireProfile:
    """The costs of one kind of wire between two processes, which the choice of a way reads.

    A message is one write of the wire: a descriptor of a ``direct`` transfer, or a slot of a ``packed`` one.

    Attributes:
        wire: name of the wire, such as ``"UCX over tcp"``.
        memory: NIXL's name of the memory on both sides, ``"DRAM"`` or ``"VRAM"``.
        how: ``"calibrated"`` on this machine, or ``"default"``: measured nowhere.
        made: version of kvplan and date.
        latency: seconds from the post of a small message until the other process can see its notification.
        post: seconds of the CPU to post one list, whatever it holds.
        descriptor: seconds of the CPU for each descriptor of a list that is posted.
        message: seconds of the wire for each message, besides its bytes.
        byte: seconds of the wire for each byte.
        overlaps: whether messages move while later ones are posted. If False, the CPU that posts moves the bytes.
        gather, scatter: costs of a slot's copies on either side.
        slot_byte: seconds of the wire for each byte of a slot, whose memory is used again and again; 0 for ``byte``.
        chunk: seconds of the CPU for each slot on either side, besides posting and copies.
        start: seconds that a packed transfer takes besides its stages, until threads of both processes have looked.
        slots: slots of a ring that its only peer may write.
        slot_nbytes: bytes of a slot.
        note: a warning to the user, or "".

    >>> from_json(default_wire("VRAM").to_json()) == default_wire("VRAM")
    True
    """

    wire: str
    memory: str
    how: str
    made: str
    latency: float
    post: float
    descriptor: float
    message: float
    byte: float
    overlaps: bool
    gather: CopyCosts
    scatter: CopyCosts
    slot_byte: float = 0.0
    chunk: float = 2e-5
    start: float = 0.0
    slots: int = 7
    slot_nbytes: int = 16 * MIB
    note: str = ""

    def to_json(self) -> str:
        """Return the profile as JSON, the text of its file."""
        return json.dumps({"schema": SCHEMA, "version": VERSION, **asdict(self)}, indent=1) + "\n"


def default_wire(memory: str = "VRAM") -> WireProfile:
    """Return a conservative guess for ``"VRAM"`` or ``"DRAM"``."""
    return from_json(_guess(memory))


def _guess(memory: str) -> str:
    return (PROFILES / "wires" / f"{memory.lower()}.json").read_text()


def from_json(text: str) -> WireProfile:
    """Read a wire's profile from JSON.

    Raises:
        KVPlanError: the text is not JSON, has another schema or version, or a value is missing or wrong.

    >>> from_json("{}")
    Traceback (most recent call last):
        ...
    kvplan.errors.KVPlanError: no profile of a wire: its schema is not 'kvplan.wire-profile'
    """
    made = values_of(text, "profile of a wire", lambda _: _guess("VRAM"))
    if not made["slots"] or not made["slot_nbytes"]:
        raise KVPlanError(f"{made['slots']} slots of {made['slot_nbytes']} bytes")
    return WireProfile(**made | {side: CopyCosts(**made[side]) for side in ("gather", "scatter")})


def wire_name(backend: str = "UCX") -> str:
    """Return the name of this process's wire: NIXL's backend, and the transports that ``UCX_TLS`` allows.

    >>> wire_name("GDS")
    'GDS'
    """
    told = os.environ.get("UCX_TLS", "") if backend == "UCX" else ""
    return f"{backend} over {told}" if told else backend


def wire_path(wire: str, memory: str) -> Path:
    """Return the path of the own profile of a wire and a kind of memory."""
    return folder() / f"wire_{slug(wire)}_{memory.lower()}.json"


def find_wire(wire: str, memory: str) -> WireProfile:
    """Return the profile of a wire: the chosen one, its own, or a guess.

    A profile that cannot be read raises no error: the log of ``kvplan`` and the ``note`` of the guess name it.

    Args:
        wire: name of the wire, from :func:`wire_name`.
        memory: NIXL's name of the memory, ``"DRAM"`` or ``"VRAM"``.
    """
    guess, told = replace(default_wire(memory), wire=wire), os.environ.get(CHOSEN, "")
    path = Path(told) if told else wire_path(wire, memory)
    if not told and not os.path.exists(path):  # nor may its folder be unreadable
        return guess
    try:
        found = read_as(path, from_json)
        if found.memory == memory:
            return found
        raise KVPlanError(f"{path}: is of {found.memory}; expected {memory}")  # told as the others
    except KVPlanError as error:
        _log.warning("profile of a wire not used: %s", error)
        return replace(guess, note=f"{error}; {guess.note}")


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

    >>> from kvplan.cost.wire import default_wire
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

    >>> from kvplan.cost.wire import default_wire
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
    >>> from kvplan.cost.wire import default_wire
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

    >>> from kvplan.cost.wire import default_wire
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

    >>> from kvplan.cost.wire import default_wire
    >>> [direct_at_once(pieces << 10, pieces, default_wire()) for pieces in (16, 65536)]
    [True, False]
    """
    begins = wire.start + wire.latency * (1 + pull)
    return bool(nbytes) and direct_cost(nbytes, pieces, wire).seconds <= begins
