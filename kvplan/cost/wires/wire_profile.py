"""Profiles of wires: what a message, a descriptor and a byte cost between two processes, and gather and scatter."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from kvplan.base.limits import LIMITS
from kvplan.base.quoting import quoted
from kvplan.base.reading import json_of
from kvplan.cost.policy import Policy
from kvplan.cost.profile import DeviceProfile
from kvplan.errors import KVPlanError, LayoutError

SCHEMA, VERSION = "kvplan.wire-profile", 2
HOWS = ("calibrated", "published", "default")
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
        lost: seconds that compute on the same GPU loses for each second of these copies.

    >>> round(CopyCosts(1e-5, 1e-9, 1e-12).seconds(runs=1000, nbytes=1_000_000) * 1e6, 3)
    12.0
    """

    fixed: float
    run: float
    byte: float
    lost: float = 0.0

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
        how: ``"calibrated"`` on this machine, ``"published"`` by others, or ``"default"``: measured nowhere.
        made: version of kvplan and date; or the source of published numbers.
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


def kernel_costs(profile: DeviceProfile, policy: Policy | None = None) -> CopyCosts:
    """Return the costs of gather and scatter by the kernel path, within a GPU.

    Args:
        profile: a GPU's own profile.
        policy: the policy, whose ``overlap`` names the compute that runs at the same time; by default no compute.

    >>> from kvplan.cost.profile import default
    >>> alone, beside = kernel_costs(default()), kernel_costs(default(), Policy(overlap="decode"))
    >>> alone.lost, round(beside.lost, 3), beside.byte > alone.byte
    (0.0, 0.091, True)
    """
    found = profile.costs["device"]["kernel"]
    overlap = "idle" if policy is None else policy.overlap
    fixed, run, byte = (NS * found.seconds[term] for term in ("fixed", "run", "byte"))
    before = max(NS * found.wall["fixed"] - fixed, 0.0)
    if overlap == "idle":
        return CopyCosts(before + fixed, run, byte)
    beside = profile.beside[overlap]["device"]["kernel"]
    slow = 1 / beside.rate
    return CopyCosts(before + fixed * slow, run * slow, byte * slow, 1 - 1 / beside.slower)


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
        KVPlanError: the text is not JSON, has another schema or version, or a wrong value, which the message names.

    >>> from_json("{}")
    Traceback (most recent call last):
        ...
    kvplan.errors.KVPlanError: no profile of a wire: its schema is not 'kvplan.wire-profile'
    """
    if len(text) > LIMITS.profile_nbytes:
        raise KVPlanError(f"more than {LIMITS.profile_nbytes:,} bytes")
    try:
        document = json_of(text)
    except LayoutError as error:
        raise KVPlanError(f"no JSON: {error}") from None
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise KVPlanError(f"no profile of a wire: its schema is not {SCHEMA!r}")
    version = document.get("version")
    if type(version) is not int or version != VERSION:
        newer = isinstance(version, int) and version > VERSION
        raise KVPlanError(f"version {quoted(version)}, {'newer than' if newer else 'where'} {VERSION} is "
                          "what is read here")  # fmt: skip
    texts = {name: _text(document, name) for name in ("wire", "made", "note")}
    times = {name: _seconds(document, name) for name in _TIMES}
    held: dict[str, Any] = {
        **texts,
        **times,
        "how": _one_of(document, "how", HOWS),
        "memory": _one_of(document, "memory", MEMORIES),
        "overlaps": _flag(document, "overlaps"),
        "gather": _copies(document, "gather"),
        "scatter": _copies(document, "scatter"),
        "slots": _whole(document, "slots", 1, MOST_SLOTS),
        "slot_nbytes": _whole(document, "slot_nbytes", 1, LIMITS.number),
    }
    return WireProfile(**held)


_TIMES = ("latency", "post", "descriptor", "message", "byte", "slot_byte", "chunk", "start")


def _text(document: Mapping[str, Any], name: str) -> str:
    value = document.get(name, "")
    if not isinstance(value, str):
        raise KVPlanError(f"{name} is {quoted(value)}; expected a text")
    return value


def _one_of(document: Mapping[str, Any], name: str, known: tuple[str, ...]) -> str:
    value = document.get(name)
    if not isinstance(value, str) or value not in known:
        raise KVPlanError(f"{name} is {quoted(value)}; expected one of {', '.join(known)}")
    return value


def _flag(document: Mapping[str, Any], name: str) -> bool:
    value = document.get(name)
    if not isinstance(value, bool):
        raise KVPlanError(f"{name} is {quoted(value)}; expected true or false")
    return value


def _seconds(document: Mapping[str, Any], name: str, where: str = "") -> float:
    value = document.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= MOST_SECONDS:  # nan is not
        raise KVPlanError(f"{where}{name} is {quoted(value)}; expected seconds from 0 to {MOST_SECONDS:g}")
    return float(value)


def _whole(document: Mapping[str, Any], name: str, least: int, most: int) -> int:
    value = document.get(name)
    if type(value) is not int or not least <= value <= most:
        raise KVPlanError(f"{name} is {quoted(value)}; expected a whole number from {least:,} to {most:,}")
    return value


def _copies(document: Mapping[str, Any], name: str) -> CopyCosts:
    held = document.get(name)
    if not isinstance(held, dict):
        raise KVPlanError(f"{name} is {quoted(held)}; expected an object of costs")
    return CopyCosts(**{field.name: _seconds(held, field.name, f"{name}.") for field in fields(CopyCosts)})
