"""Profiles of wires: what a message, a descriptor and a byte cost between two processes, and gather and scatter.

The profile of a wire is a chosen file, the user's own, or a guess: ``dram.json`` and ``vram.json``. The guess for GPU
memory is of a NIC of 400 Gb/s; that for host memory of UCX over shared memory on a small machine, where the CPU that
posts moves the bytes. What kvplan's own protocol takes in them was measured on small machines and an H200.
"""

from __future__ import annotations

import json
import logging
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from kvplan.cost.profile import values_of
from kvplan.cost.store import folder, read_as, slug
from kvplan.errors import KVPlanError

SCHEMA, VERSION = "kvplan.wire-profile", 2
MIB = 1 << 20
# Environment variable: the file of the profile of every wire of this process, instead of its own profiles.
CHOSEN = "KVPLAN_WIRE"
_log = logging.getLogger("kvplan")


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
    return Path(__file__).with_name(f"{memory.lower()}.json").read_text()


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
