"""The store of device profiles: the user's cache folder, and the profiles that kvplan ships."""

from __future__ import annotations

import logging
import os
import re
import tempfile
from dataclasses import replace
from pathlib import Path

from kvplan.base.files import write_whole
from kvplan.base.limits import LIMITS
from kvplan.base.reading import read_whole, why_unread
from kvplan.cost.profile import DeviceProfile, default, from_json
from kvplan.cuda.machine import Machine, machine
from kvplan.errors import KVPlanError

CHOSEN = "KVPLAN_PROFILE"  # environment variable: file of the profile to use instead of all other profiles
SHIPPED = Path(__file__).parent / "profiles"
_log = logging.getLogger("kvplan")


def folder() -> Path:
    """Return the folder of the user's profiles, by the XDG base directory specification.

    Raises:
        KVPlanError: the user's home folder is not known.
    """
    told = os.environ.get("XDG_CACHE_HOME", "")
    try:
        base = Path(told) if told and Path(told).is_absolute() else Path.home() / ".cache"
    except RuntimeError:  # such as in a container whose user has no passwd entry
        raise KVPlanError("no home folder for profiles; set HOME or XDG_CACHE_HOME") from None
    return base / "kvplan" / "profiles"


def key(gpu: str, driver: str, generation: int | None, width: int | None) -> str:
    """Return the name of a profile's file: GPU, driver and link.

    >>> key("NVIDIA H100 80GB HBM3", "580.159.04", 5, 16), key("NVIDIA GB10", "", None, None)
    ('nvidia-h100-80gb-hbm3_580.159.04_pcie5x16', 'nvidia-gb10_any_link')
    """
    slug = re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-") or "gpu"
    link = "link" if generation is None or width is None else f"pcie{generation}x{width}"
    return f"{slug}_{re.sub(r'[^0-9.]', '', driver) or 'any'}_{link}"


def path_of(here: Machine) -> Path:
    """Return the path of a machine's own profile."""
    return folder() / f"{key(here.gpu, here.driver, *here.link.key)}.json"


def save(profile: DeviceProfile, path: Path) -> None:
    """Write a profile to a file; see :func:`kvplan.base.files.write_whole`.

    Raises:
        KVPlanError: the file cannot be written.
    """
    try:
        Path(os.path.realpath(path)).parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, profile.to_json().encode())
    except OSError as error:
        raise KVPlanError(f"the profile cannot be written to {path}: {error.strerror or error}") from None


def check_writable(path: Path) -> None:
    """Check that a profile can be written to ``path``; make its folder if it is missing.

    Raises:
        KVPlanError: the profile cannot be written; the message says why.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise KVPlanError(f"the profile cannot be written to {path}: it is a folder")
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise KVPlanError(f"the profile cannot be written to {path}: {error.strerror or error}") from None


def read(path: Path) -> DeviceProfile:
    """Read the profile in a file.

    Raises:
        KVPlanError: the file cannot be read, or is not a profile; the message names the file and the reason.
    """
    try:
        return from_json(read_whole(path, LIMITS.profile_nbytes))
    except UnicodeDecodeError:
        raise KVPlanError(f"{path}: no text") from None
    except OSError as error:
        raise KVPlanError(f"{path}: {why_unread(error)}") from None
    except KVPlanError as error:
        raise KVPlanError(f"{path}: {error}") from None


def find_for(ordinal: int) -> DeviceProfile:
    """Return the profile of a GPU, by its number among the visible GPUs; never raise an error."""
    try:
        return find(machine(ordinal))
    except KVPlanError as error:  # the driver does not describe the GPU
        return replace(default(), note=f"{default().note}; {error}")


def find(here: Machine) -> DeviceProfile:
    """Find the profile of a machine: the chosen one, its own, a shipped one, or the default; never raise an error.

    If a profile cannot be read, the log of ``kvplan`` and the ``note`` of the returned profile name it.
    """
    told = os.environ.get(CHOSEN, "")
    notes = []
    try:
        path = Path(told) if told else path_of(here)
        if told or path.exists():
            return _checked(read(path), here, path)
    except (KVPlanError, OSError) as error:
        notes.append(f"{error}; run `kvplan calibrate`")
    try:
        found = shipped(here) or default()
    except KVPlanError as error:
        notes.append(str(error))
        found = default()
    for note in notes:
        _log.warning("device profile not used: %s", note)
    return replace(found, note="; ".join([*notes, *([found.note] if found.note else [])]))


def _checked(profile: DeviceProfile, here: Machine, path: Path) -> DeviceProfile:
    """Check that a profile was measured on this machine's GPU.

    Raises:
        KVPlanError: the profile was measured on another GPU.
    """
    if profile.gpu and here.gpu and profile.gpu != here.gpu:
        raise KVPlanError(f"{path}: is of {profile.gpu}, and this is {here.gpu}")
    return profile


def shipped(here: Machine) -> DeviceProfile | None:
    """Return the shipped profile of a machine's GPU and link, or None. Its driver may be another one."""
    generation, width = here.link.key
    known = [one for one in all_shipped()
             if (one.gpu, one.generation, one.width) == (here.gpu, generation, width)]  # fmt: skip
    if not known:
        return None
    profile = next((one for one in known if one.driver == here.driver), known[0])
    if profile.driver == here.driver:
        return profile
    note = f"measured with driver {profile.driver}, and this is {here.driver or 'not known'}"
    return replace(profile, note=f"{note}: `kvplan calibrate` measures here")


def all_shipped() -> list[DeviceProfile]:
    """Return all shipped profiles, in order of the GPU's name."""
    return [read(path) for path in sorted(SHIPPED.glob("*.json"))]


def by_name(name: str) -> DeviceProfile:
    """Return the shipped profile whose GPU has ``name`` in its name, the default, or the profile in a file.

    Raises:
        KVPlanError: no profile or several have the name; the message lists the names.

    >>> by_name("default").how
    'default'
    """
    if name == "default":
        return default()
    if Path(name).suffix == ".json" or Path(name).is_file():
        return read(Path(name))
    found = [profile for profile in all_shipped() if name.lower() in profile.gpu.lower()]
    if len(found) != 1:
        names = ", ".join(profile.gpu for profile in (found or all_shipped()))
        raise KVPlanError(
            f"{'several profiles' if found else 'no profile'} of {name!r}; there are {names}, default, or a file"
        )
    return found[0]
