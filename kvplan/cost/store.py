"""The store of device profiles: the user's cache folder, and the profiles that kvplan ships."""

from __future__ import annotations

import logging
import os
import re
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from kvplan.base.files import write_whole
from kvplan.base.limits import LIMITS
from kvplan.base.reading import read_whole, why_unread
from kvplan.cost.profile import ANY_PEER, PROFILES, DeviceProfile, default, default_pair, from_json
from kvplan.cuda.driver import driver
from kvplan.cuda.machine import Machine, machine
from kvplan.errors import KVPlanError, TransferError

if TYPE_CHECKING:
    from kvplan.cuda.peers import PeerLink

# Environment variable: files of the profiles to use instead of all other profiles, separated as in PATH. A GPU's own
# profile is used for loads, stores and copies within a GPU; a pair's profile for copies between GPUs.
CHOSEN = "KVPLAN_PROFILE"
SHIPPED = PROFILES
Profile = TypeVar("Profile")
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


def slug(gpu: str) -> str:
    """Return a name as a file's name has it.

    >>> slug("NVIDIA H100 80GB HBM3")
    'nvidia-h100-80gb-hbm3'
    """
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-") or "gpu"


def path_of(here: Machine, there: Machine | None = None, link: PeerLink | None = None) -> Path:
    """Return the path of the own profile of a GPU, or of a GPU ``here`` and its peer ``there``: by driver and link."""
    driver, tail = re.sub(r"[^0-9.]", "", here.driver) or "any", "link"
    if there is not None and link is not None:
        return folder() / f"{slug(here.gpu)}_to_{slug(there.gpu)}_{driver}_{link.key}.json"
    generation, width = here.link.key
    if generation is not None and width is not None:
        tail = f"pcie{generation}x{width}"
    return folder() / f"{slug(here.gpu)}_{driver}_{tail}.json"


def save(profile: DeviceProfile, path: Path) -> None:
    """Write a profile to a file; see :func:`kvplan.base.files.write_whole`.

    Raises:
        KVPlanError: the file cannot be written.
    """
    save_text(profile.to_json(), path)


def save_text(text: str, path: Path) -> None:
    """Write the text of any profile to a file, and make its folder if it is missing; raise KVPlanError if it cannot."""
    try:
        Path(os.path.realpath(path)).parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text.encode())
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
    return read_text(path, from_json)


def read_text(path: Path, parse: Callable[[str], Profile]) -> Profile:
    """Read any profile in a file.

    Args:
        path: the file.
        parse: function that reads the profile from the file's text, and raises KVPlanError if it is wrong.

    Raises:
        KVPlanError: the file cannot be read, or is not such a profile; the message names the file and the reason.
    """
    try:
        return parse(read_whole(path, LIMITS.profile_nbytes))
    except UnicodeDecodeError:
        raise KVPlanError(f"{path}: no text") from None
    except OSError as error:
        raise KVPlanError(f"{path}: {why_unread(error)}") from None
    except KVPlanError as error:
        raise KVPlanError(f"{path}: {error}") from None


def find_for(ordinal: int, peer: int | None = None) -> DeviceProfile:
    """Return the profile of a GPU, or of it and its peer, by their numbers among visible GPUs; never raise an error."""
    try:
        if peer is None:
            return find(machine(ordinal))
        from kvplan.cuda.peers import link_between

        return find(machine(ordinal), machine(peer), link_between(ordinal, peer))
    except KVPlanError as error:  # the driver does not describe the GPU
        guess = default() if peer is None else default_pair()
        return replace(guess, note=f"{guess.note}; {error}")


def find(here: Machine, there: Machine | None = None, link: PeerLink | None = None) -> DeviceProfile:
    """Find the profile of a GPU, or of it and its peer; never raise an error.

    It is the chosen one, its own, a shipped one, or the default. If a profile cannot be read, the log of ``kvplan`` and
    the ``note`` of the returned profile name it.
    """
    peer = "" if there is None else there.gpu or ANY_PEER
    notes, retry = [], f"run `kvplan calibrate{' --peer cuda:M' * bool(peer)}`"
    for told in filter(None, os.environ.get(CHOSEN, "").split(os.pathsep)):
        try:
            chosen = read(Path(told))
            if bool(chosen.peer) == bool(peer):
                return _checked(chosen, here, peer, Path(told))
        except KVPlanError as error:
            notes.append(f"{error}; {retry}")
    try:
        path = path_of(here, there, link)
        if not notes and path.exists():  # the user chose another file than this one
            return _checked(read(path), here, peer, path)
    except (KVPlanError, OSError) as error:
        notes.append(f"{error}; {retry}")
    found = None
    try:
        found = shipped(here, there, link)
    except KVPlanError as error:
        notes.append(str(error))
    for note in notes:
        _log.warning("device profile not used: %s", note)
    found = found or (default_pair() if peer else default())
    return replace(found, note="; ".join([*notes, *([found.note] if found.note else [])]))


def _checked(profile: DeviceProfile, here: Machine, peer: str, path: Path) -> DeviceProfile:
    """Check that a profile was measured on this machine's GPU, and with this peer.

    Raises:
        KVPlanError: the profile was measured on another GPU, or with another peer, or it is not of a pair.
    """
    if bool(profile.peer) != bool(peer):
        raise KVPlanError(f"{path}: is of {profile.kind}; expected {'a pair of GPUs' if peer else 'one GPU'}")
    told = f"{here.gpu} to {peer}" if peer else here.gpu
    if profile.gpu and here.gpu and profile.kind != told:
        raise KVPlanError(f"{path}: is of {profile.kind}, and this is {told}")
    return profile


def shipped(here: Machine, there: Machine | None = None, link: PeerLink | None = None) -> DeviceProfile | None:
    """Return the shipped profile of a GPU and its link, or of a pair, or None. Its driver may be another one."""
    if there is not None and link is not None:
        known = [one for one in all_shipped(pairs=True)
                 if (one.gpu, one.peer, one.nvlinks) == (here.gpu, there.gpu, link.nvlinks)]  # fmt: skip
    else:
        known = [one for one in all_shipped() if (one.gpu, (one.generation, one.width)) == (here.gpu, here.link.key)]
    if not known:
        return None
    profile = next((one for one in known if one.driver == here.driver), known[0])
    if profile.driver == here.driver:
        return profile
    note = f"measured with driver {profile.driver}, and this is {here.driver or 'not known'}"
    retry = f"`kvplan calibrate{' --peer cuda:M' * bool(profile.peer)}` measures here"
    return replace(profile, note=f"{note}: {retry}")


def all_shipped(*, pairs: bool = False) -> list[DeviceProfile]:
    """Return the shipped profiles of GPUs, or of pairs, in order of the GPU's name."""
    profiles = [read(path) for path in sorted(SHIPPED.glob("*.json"))]
    return [profile for profile in profiles if profile.how == "shipped" and bool(profile.peer) == pairs]


def by_name(name: str) -> DeviceProfile:
    """Return a GPU's own profile: the shipped one with ``name`` in its GPU's name, the default, or the one in a file.

    Raises:
        KVPlanError: no profile or several have the name, and the message lists the names; or the file is of a pair.

    >>> by_name("default").how
    'default'
    """
    if name == "default":
        return default()
    if Path(name).suffix == ".json" or Path(name).is_file():
        profile = read(Path(name))
        if profile.peer:
            raise KVPlanError(f"{name}: is of {profile.kind}; expected one GPU")
        return profile
    found = [profile for profile in all_shipped() if name.lower() in profile.gpu.lower()]
    if len(found) != 1:
        names = ", ".join(profile.gpu for profile in (found or all_shipped()))
        raise KVPlanError(
            f"{'several profiles' if found else 'no profile'} of {name!r}; there are {names}, default, or a file"
        )
    return found[0]


def profile_of(name: str | None) -> tuple[DeviceProfile, str]:
    """Return a profile by name, and ""; or for None the profile of this machine's first GPU.

    Without a GPU, it is a shipped profile, and the text names its GPU.
    """
    if name is not None:
        return by_name(name), ""
    try:
        driver()
    except TransferError:
        profile = all_shipped()[0]
        return profile, f"no GPU here: as on an {profile.gpu}"
    return find_for(0), ""
