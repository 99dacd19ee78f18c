"""The store of profiles: the user's cache folder, and the device profiles that kvplan ships."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from kvplan.base.files import LIMITS, read_whole
from kvplan.cost.profile import ANY_PEER, PROFILES, DeviceProfile, default, default_pair, from_json
from kvplan.cuda.machine import Machine, machine
from kvplan.errors import KVPlanError

if TYPE_CHECKING:
    from kvplan.cuda.peers import PeerLink

# Environment variable: files of the profiles to use instead of all other profiles, separated as in PATH. A GPU's own
# profile is used for loads, stores and copies within a GPU; a pair's profile for copies between GPUs.
CHOSEN = "KVPLAN_PROFILE"
Profile = TypeVar("Profile")
_log = logging.getLogger("kvplan")


def folder() -> Path:
    """Return the folder of the user's profiles, by the XDG base directory specification."""
    told = os.environ.get("XDG_CACHE_HOME", "")
    cache = told if Path(told).is_absolute() else os.path.expanduser("~/.cache")  # raises no error
    return Path(cache, "kvplan", "profiles")


def slug(name: str) -> str:
    """Return a name as a file's name has it.

    >>> slug("NVIDIA H100 80GB HBM3")
    'nvidia-h100-80gb-hbm3'
    """
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "gpu"


def path_of(here: Machine, there: Machine | None = None, link: PeerLink | None = None) -> Path:
    """Return the path of the own profile of a GPU, or of a GPU ``here`` and its peer ``there``: by driver and link."""
    gpu, version = slug(here.gpu), re.sub(r"[^0-9.]", "", here.driver) or "any"
    if there is not None and link is not None:
        return folder() / f"{gpu}_to_{slug(there.gpu)}_{version}_{link.key}.json"
    tail = "link" if None in here.link.key else "pcie{}x{}".format(*here.link.key)
    return folder() / f"{gpu}_{version}_{tail}.json"


def read(path: Path) -> DeviceProfile:
    """Read the profile of a GPU or of a pair in a file; see :func:`read_as`."""
    return read_as(path, from_json)


def read_as(path: Path, parse: Callable[[str], Profile]) -> Profile:
    """Read any profile in a file.

    Args:
        path: the file.
        parse: function that reads the profile from the file's text, and raises KVPlanError if it is wrong.

    Raises:
        KVPlanError: the file cannot be read, or is not such a profile; the message names the file and the reason.
    """
    try:
        return parse(read_whole(path, LIMITS.profile_nbytes))
    except KVPlanError as error:
        raise KVPlanError(f"{path}: {error}") from None


def find_for(ordinal: int, peer: int | None = None) -> DeviceProfile:
    """Return the profile of a GPU, or of it and its peer, by their numbers among visible GPUs; see :func:`find`.

    Raises:
        KVPlanError: there is no such GPU, or no driver.
    """
    if peer is None:
        return find(machine(ordinal))
    from kvplan.cuda.peers import link_between

    return find(machine(ordinal), machine(peer), link_between(ordinal, peer))


def find(here: Machine, there: Machine | None = None, link: PeerLink | None = None) -> DeviceProfile:
    """Find the profile of a GPU, or of it and its peer; never raise an error.

    It is the chosen one, its own, a shipped one, or the default. If a profile cannot be read, the log of ``kvplan`` and
    the ``note`` of the returned profile name it.
    """
    peer, own = "" if there is None else there.gpu or ANY_PEER, path_of(here, there, link)
    notes: list[str] = []
    command = f"`kvplan calibrate{' --peer cuda:M' * bool(peer)}`"
    this = f"{here.gpu} to {peer}" if peer else here.gpu
    for path in [*map(Path, filter(None, os.environ.get(CHOSEN, "").split(os.pathsep))), own]:
        if path == own and (notes or not os.path.exists(own)):  # its folder may be unreadable
            continue  # the user chose another file than this one, or there is none
        try:
            profile = read(path)
            if bool(profile.peer) != bool(peer):
                continue
            if not profile.gpu or not here.gpu or profile.kind == this:
                return profile
            raise KVPlanError(f"{path}: is of {profile.kind}, and this is {this}")  # told as the others
        except KVPlanError as error:
            notes.append(f"{error}; run {command}")
    for note in notes:
        _log.warning("device profile not used: %s", note)
    wanted: tuple[object, ...] = here.gpu, *here.link.key, "", None
    if there is not None and link is not None:
        wanted = here.gpu, None, None, there.gpu, link.nvlinks
    known = [one for one in shipped() if (one.gpu, one.generation, one.width, one.peer, one.nvlinks) == wanted]
    profile = min(known, key=lambda one: one.driver != here.driver, default=default_pair() if peer else default())
    if known and profile.driver != here.driver:
        notes.append(f"measured with driver {profile.driver}, and this is {here.driver or 'not known'}; run {command}")
    return replace(profile, note="; ".join(filter(None, [*notes, profile.note])))


def shipped() -> list[DeviceProfile]:
    """Return the shipped profiles of GPUs and of pairs, in order of the GPU's name."""
    return [one for one in map(read, sorted(PROFILES.glob("*.json"))) if one.how == "shipped"]


def by_name(name: str) -> DeviceProfile:
    """Return a profile: the shipped one of a GPU with ``name`` in its name, the default, or the one in a file.

    Raises:
        KVPlanError: no profile or several have the name, and the message lists the names.

    >>> by_name("default").how
    'default'
    """
    if Path(name).suffix == ".json" or Path(name).is_file():
        return read(Path(name))
    known = {one.gpu: one for one in shipped() if not one.peer} | {"default": default()}
    near = [gpu for gpu in known if name.lower() in gpu.lower()]
    if len(near) != 1:
        raise KVPlanError(f"{len(near)} profiles are of {name!r}; there are {', '.join(known)}, or a file")
    return known[near[0]]


def profile_of(name: str | None) -> tuple[DeviceProfile, str]:
    """Return a profile by name, and ""; or for None the profile of this machine's first GPU.

    Without a GPU, it is a shipped profile, and the text names its GPU.
    """
    if name is not None:
        return by_name(name), ""
    try:
        return find_for(0), ""
    except KVPlanError:
        profile = shipped()[0]
        return profile, f"no GPU here: as on an {profile.gpu}"
