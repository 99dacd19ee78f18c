"""Find the profile of a wire: the chosen file, the user's own, or a guess."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from kvplan.cost.store import folder, read_text, save_text, slug
from kvplan.cost.wires.wire_profile import WireProfile, default_wire, from_json
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
