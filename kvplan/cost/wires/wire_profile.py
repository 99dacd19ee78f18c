"""Profiles of wires: what a message, a descriptor and a byte cost between two processes, and gather and scatter."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from kvplan.base.limits import LIMITS
from kvplan.base.quoting import quoted
from kvplan.cost.profile import DeviceProfile, document_of, number_of, text_of
from kvplan.errors import KVPlanError

SCHEMA, VERSION = "kvplan.wire-profile", 2
HOWS = ("calibrated", "default")
MEMORIES = ("DRAM", "VRAM")
MIB = 1 << 20
SLOT_SIZES = tuple(MIB << power for power in range(7))  # bytes: 1 to 64 MiB
MOST_SECONDS, MOST_SLOTS = 1e3, 1 << 10  # bounds of a profile's numbers
NS = 1e-9


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

    >>> made = default_wire("VRAM")
    >>> made.message_rate, round(made.gbps, 6), from_json(made.to_json()) == made
    (10000000.0, 50.0, True)
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

    @property
    def message_rate(self) -> float:
        """Return the messages per second that the wire moves if they are small; infinity if messages cost nothing."""
        return 1 / self.message if self.message else float("inf")

    @property
    def gbps(self) -> float:
        """Return the bandwidth of one large message in GB/s: 1e9 bytes per second."""
        return 1e-9 / self.byte if self.byte else float("inf")

    @property
    def kind(self) -> str:
        """Return the wire and the memory in words.

        >>> default_wire("DRAM").kind
        'any wire, host memory'
        """
        return f"{self.wire or 'any wire'}, {'GPU' if self.memory == 'VRAM' else 'host'} memory"


def kernel_costs(profile: DeviceProfile) -> CopyCosts:
    """Return the costs of gather and scatter by the kernel path, within a GPU that has this profile."""
    found = profile.costs["device"]["kernel"]
    fixed, run, byte = (NS * found.seconds[term] for term in ("fixed", "run", "byte"))
    return CopyCosts(max(NS * found.wall["fixed"], fixed), run, byte)


# Guesses, in seconds. Host memory: UCX over shared memory on a small machine, where the CPU that posts moves the bytes.
_HOST = CopyCosts(4e-5, 1.5e-8, 2e-10)
_GPU = CopyCosts(5e-5, 2e-11, 6e-13)
# The protocol of kvplan's agents between two processes, by kind of memory: as measured on small machines and an H200.
CHUNK, START = {"DRAM": 1e-4, "VRAM": 2.5e-4}, {"DRAM": 8e-4, "VRAM": 1.3e-3}
_NOTE = "a guess that was measured nowhere: run `kvplan calibrate --wire`"


def default_wire(memory: str = "VRAM") -> WireProfile:
    """Return a conservative guess: one NIC of 400 Gb/s for GPU memory, and shared memory for host memory.

    Args:
        memory: ``"VRAM"`` or ``"DRAM"``.

    Raises:
        KVPlanError: another name.
    """
    if memory not in MEMORIES:
        raise KVPlanError(f"memory is {quoted(memory)}; NIXL's names here are {' and '.join(MEMORIES)}")
    made = "kvplan, measured nowhere"
    if memory == "VRAM":
        return WireProfile("", memory, "default", made, latency=5e-6, post=5e-6, descriptor=5e-7, message=1e-7,
                           byte=2e-11, overlaps=True, gather=_GPU, scatter=_GPU, note=_NOTE,
                           chunk=CHUNK[memory], start=START[memory])  # fmt: skip
    return WireProfile("", memory, "default", made, latency=3e-5, post=1e-5, descriptor=4e-6, message=0.0,
                       byte=1.6e-10, overlaps=False, gather=_HOST, scatter=_HOST, slots=5, slot_nbytes=4 * MIB,
                       note=_NOTE, chunk=CHUNK[memory], start=START[memory])  # fmt: skip


def from_json(text: str) -> WireProfile:
    """Read a wire's profile from JSON.

    Raises:
        KVPlanError: the text is not JSON, has another schema or version, or a value is missing or wrong.

    >>> from_json("{}")
    Traceback (most recent call last):
        ...
    kvplan.errors.KVPlanError: no profile of a wire: its schema is not 'kvplan.wire-profile'
    """
    document = document_of(text, SCHEMA, VERSION, "profile of a wire")
    try:
        return _profile(document)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise KVPlanError(f"a value of the wire's profile is missing or wrong: {quoted(str(error))}") from None


_TIMES = ("latency", "post", "descriptor", "message", "byte", "slot_byte", "chunk", "start")


def _profile(document: Mapping[str, Any]) -> WireProfile:
    slots, slot_nbytes = document["slots"], document["slot_nbytes"]
    if document["how"] not in HOWS or document["memory"] not in MEMORIES or type(document["overlaps"]) is not bool:
        raise ValueError(f"how is one of {HOWS}, memory one of {MEMORIES}, and overlaps true or false")
    if type(slots) is not int or type(slot_nbytes) is not int:
        raise ValueError(f"{slots!r} slots of {slot_nbytes!r} bytes")
    if not (1 <= slots <= MOST_SLOTS and 1 <= slot_nbytes <= LIMITS.number):
        raise ValueError(f"{slots} slots of {slot_nbytes} bytes")
    facts: dict[str, Any] = {name: text_of(document[name]) for name in ("wire", "memory", "how", "made", "note")}
    facts |= {name: number_of(document[name], MOST_SECONDS) for name in _TIMES}
    return WireProfile(
        **facts,
        overlaps=document["overlaps"], gather=_copies(document["gather"]), scatter=_copies(document["scatter"]),
        slots=slots, slot_nbytes=slot_nbytes,
    )  # fmt: skip


def _copies(values: Mapping[str, Any]) -> CopyCosts:
    return CopyCosts(*(number_of(values[field.name], MOST_SECONDS) for field in fields(CopyCosts)))
