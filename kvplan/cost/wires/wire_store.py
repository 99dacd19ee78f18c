"""Find the profile of a wire: the chosen file, the user's own, a published one, or a guess."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

from kvplan.base.quoting import quoted
from kvplan.cost.store import by_name, folder, read_text, save_text, slug
from kvplan.cost.wires.wire_profile import CHUNK, MIB, START, WireProfile, default_wire, from_json, kernel_costs
from kvplan.errors import KVPlanError

# Environment variable: the file of the profile of every wire of this process, instead of its own profiles.
CHOSEN = "KVPLAN_WIRE"
_log = logging.getLogger("kvplan")


def wire_name(backend: str = "UCX", environment: Mapping[str, str] | None = None) -> str:
    """Return the name of this process's wire: NIXL's backend, and the transports that UCX may take.

    Args:
        backend: name of the backend.
        environment: variables of the process; by default its own. ``UCX_TLS`` names the transports.

    >>> wire_name("UCX", {}), wire_name("UCX", {"UCX_TLS": "tcp"})
    ('UCX', 'UCX over tcp')
    """
    told = (os.environ if environment is None else environment).get("UCX_TLS", "") if backend == "UCX" else ""
    return f"{backend} over {told}" if told else backend


def wire_path(wire: str, memory: str) -> Path:
    """Return the path of the own profile of a wire and a kind of memory."""
    return folder() / f"wire_{slug(wire)}_{memory.lower()}.json"


def save_wire(profile: WireProfile, path: Path) -> None:
    """Write a profile to a file.

    Raises:
        KVPlanError: the file cannot be written.
    """
    save_text(profile.to_json(), path)


def read_wire(path: Path) -> WireProfile:
    """Read the profile of a wire in a file.

    Raises:
        KVPlanError: the file cannot be read, or is no such profile; the message names the file and the reason.
    """
    return read_text(path, from_json)


def find_wire(wire: str, memory: str) -> WireProfile:
    """Return the profile of a wire: the chosen one, its own, or a guess.

    A profile that cannot be read raises no error: the log of ``kvplan`` and the ``note`` of the guess name it.

    Args:
        wire: name of the wire, from :func:`wire_name`.
        memory: NIXL's name of the memory, ``"DRAM"`` or ``"VRAM"``.

    Raises:
        KVPlanError: another name of the memory.
    """
    guess = default_wire(memory)
    told = os.environ.get(CHOSEN, "")
    try:
        path = Path(told) if told else wire_path(wire, memory)
        if not told and not path.exists():
            return replace(guess, wire=wire)
        return _checked(read_wire(path), replace(guess, wire=wire), path)
    except (KVPlanError, OSError) as error:
        why = f"{error}; run `kvplan calibrate --wire`"
        _log.warning("profile of a wire not used: %s", why)
        return replace(guess, wire=wire, note=f"{why}; {guess.note}")


def _checked(found: WireProfile, expected: WireProfile, path: Path) -> WireProfile:
    if found.memory != expected.memory:
        raise KVPlanError(f"{path}: is of {found.kind}; expected {expected.kind}")
    return found


# ---- what others have published ------------------------------------------------------------------------------------

# Each source gives the descriptors of a transfer, and a time or a share of it. The rest is the model of a NIC.
NIC_GBPS, NIC_LATENCY, NIC_RATE = 50.0, 5e-6, 1e7  # 400 Gb/s; seconds; messages a second of one queue pair
_GLM = 105_500, 4.9e9  # descriptors (91,000 to 120,000) and bytes of a rank's transfer, vLLM #55434


def _posting(share: float) -> float:
    """Return the seconds of a descriptor, where posting takes this share of a transfer whose bytes fill a NIC."""
    count, nbytes = _GLM
    return share / (1 - share) * nbytes / (NIC_GBPS * 1e9) / count


# Seconds of the CPU for a descriptor, and the source.
_PUBLISHED = {
    "rdma": (_posting(0.15), "vLLM #55434: over four rails of InfiniBand, 15 % of the time posts 105,500 descriptors"),
    "rdma-rows": (168_000 * 576 / 1.23e9 / 168_000, "SGLang #35186: 168,000 rows of 576 bytes at 1.23 GB/s"),
    "cuda-ipc": (_posting(0.569), "vLLM #55434: over cuda_ipc, 56.9 % of the time posts 105,500 descriptors"),
    "push": (
        (46e-3 - 0.46e-3) / (18_880 - 118),
        "vLLM #35264: 118 descriptors take 0.46 ms to post, 18,880 take 46 ms",
    ),
}
PUBLISHED = tuple(_PUBLISHED)


@cache
def published(name: str) -> WireProfile:
    """Return the model of a NIC of 400 Gb/s with a published cost of a descriptor.

    Gather, scatter and kvplan's protocol cost what they cost on an H200.

    Raises:
        KVPlanError: another name.

    >>> [round(published(name).descriptor * 1e6, 2) for name in PUBLISHED]
    [0.16, 0.47, 1.23, 2.43]
    """
    if name not in _PUBLISHED:
        raise KVPlanError(f"no published wire {quoted(name)}; there are {', '.join(PUBLISHED)}")
    seconds, source = _PUBLISHED[name]
    copies = kernel_costs(by_name("h200"))
    return WireProfile(
        wire=f"NIC of 400 Gb/s, {name}", memory="VRAM", how="published", made=source, latency=NIC_LATENCY, post=5e-6,
        descriptor=seconds, message=1 / NIC_RATE, byte=1e-9 / NIC_GBPS, overlaps=True, gather=copies, scatter=copies,
        slot_nbytes=16 * MIB, chunk=CHUNK["VRAM"], start=START["VRAM"],
    )  # fmt: skip


def wire_by_name(name: str) -> WireProfile:
    """Return a published profile, a guess (``"default"`` or ``"host"``), or the profile in a file.

    Raises:
        KVPlanError: no profile has the name, and the message lists the names; or the file cannot be read.

    >>> wire_by_name("default").memory, wire_by_name("host").memory
    ('VRAM', 'DRAM')
    """
    if name in ("default", "host"):
        return default_wire("VRAM" if name == "default" else "DRAM")
    if name in _PUBLISHED:
        return published(name)
    if Path(name).suffix == ".json" or Path(name).is_file():
        return read_wire(Path(name))
    raise KVPlanError(f"no wire {quoted(name)}; there are {', '.join(PUBLISHED)}, default, host, or a file")
