"""Device profiles: measured costs of each path for one GPU, or for one GPU and its peer; and guesses of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from kvplan.base.files import json_of
from kvplan.base.numbers import count_of
from kvplan.base.values import quoted
from kvplan.cost.policy import HOST_ROUTES
from kvplan.errors import KVPlanError

SCHEMA, VERSION = "kvplan.profile", 2
PROFILES = Path(__file__).parent / "profiles"  # those that kvplan ships
MOST = 1e15  # the largest number in a profile, so that sums of products stay finite
GPU_ROUTES = (*HOST_ROUTES, "device")  # routes of a GPU's own profile; a pair's are PEER_ROUTES
ANY_PEER = "any GPU"  # the peer in a pair's profile that was measured nowhere

# The terms of each path. cost/model.py counts them in a plan; a profile has their costs in nanoseconds.
TERMS: dict[str, tuple[str, ...]] = {
    "kernel": ("fixed", "run", "byte"),
    "copy_engine": ("fixed", "small_copy", "large_copy", "byte"),
    "copy_engine_2d": ("fixed", "call", "row", "byte"),
    "staged": ("fixed", "small_extent", "large_extent", "byte"),
}
Costs = Mapping[str, float]


@dataclass(frozen=True)
class PathCosts:
    """Costs of the terms of one path and direction, in nanoseconds; see :data:`TERMS`.

    Attributes:
        seconds: costs in the time from the first to the last event on the GPU.
        wall: costs in the time from the call of submit until the caller knows the end.
        program: like ``seconds``, for the kernel path with one Triton program; empty for other paths. Between GPU
            memories, it is a program as it runs beside compute.
    """

    seconds: Costs
    wall: Costs
    program: Costs = field(default_factory=dict)


@dataclass(frozen=True)
class Beside:
    """Costs of a path beside compute.

    A kernel waits until an SM is free, which takes longer than a small transfer. Bytes go slower, too.

    Attributes:
        wall: like :attr:`PathCosts.wall`, beside compute.
        slower: time of an iteration of compute while bytes move, divided by its time alone.
    """

    wall: Costs
    slower: float


@dataclass(frozen=True)
class DeviceProfile:
    """The measured costs of one kind of GPU and link, which the cost model reads.

    A GPU's own profile has the routes to and from the host, and within the GPU. The profile of a pair has the routes
    from a GPU to its peer, and back; the GPU is the one whose executor moves the bytes.

    Attributes:
        gpu: name of the GPU.
        driver: version of the driver.
        generation, width: generation and lanes of the PCIe link to the host; None if not known, or in a pair's profile.
        how: ``"calibrated"`` on this machine, ``"shipped"`` with kvplan, or ``"default"``: measured nowhere.
        made: version of kvplan and date: ``"kvplan 0.1.0, 2026-11-21"``.
        multiprocessors: number of SMs of the GPU.
        ceilings: GB/s by route of one large copy by the copy engine (``"load"``), and of a copy by SMs (``"sm_load"``).
            A GPU's own profile also has the bytes read plus the bytes written within its memory (``"memory"``).
        costs: costs by route and path.
        beside: costs beside compute by kind of compute (``"decode"``, ``"prefill"``), route and path.
        note: a warning to the user, or "".
        guessed: names of costs that were not measured, such as ``"store staged"`` or ``"decode load kernel"``.
        peer: name of the other GPU of a pair; "" in a GPU's own profile.
        nvlinks: number of NVLink links of a pair; 0 if there are none, and None if not known, or without a peer.

    >>> tuple(default().costs), sorted(default().costs["load"])
    (('load', 'store', 'device'), ['copy_engine', 'copy_engine_2d', 'kernel', 'staged'])
    >>> tuple(default_pair().costs), sorted(default_pair().costs["push"])
    (('push', 'pull'), ['copy_engine', 'copy_engine_2d', 'kernel'])
    """

    gpu: str
    driver: str
    generation: int | None
    width: int | None
    how: str
    made: str
    multiprocessors: int
    ceilings: Mapping[str, float]
    costs: Mapping[str, Mapping[str, PathCosts]]
    beside: Mapping[str, Mapping[str, Mapping[str, Beside]]]
    note: str = ""
    guessed: tuple[str, ...] = ()
    peer: str = ""
    nvlinks: int | None = None

    def to_json(self) -> str:
        """Return the profile as JSON, the text of its file."""
        return json.dumps({"schema": SCHEMA, "version": VERSION, **asdict(self)}, indent=1) + "\n"

    @property
    def link(self) -> str:
        """Return the link in words.

        >>> from dataclasses import replace
        >>> default().link, replace(default_pair(), nvlinks=18).link, replace(default_pair(), nvlinks=0).link
        ('a link not known', 'NVLink, 18 links', 'PCIe')
        """
        if self.peer and self.nvlinks is not None:
            return f"NVLink, {count_of(self.nvlinks, 'link')}" if self.nvlinks else "PCIe"
        return f"PCIe {self.generation} x{self.width}" if self.generation and self.width else "a link not known"

    @property
    def kind(self) -> str:
        """Return the GPU, or the GPU and its peer, in words.

        >>> from dataclasses import replace
        >>> default().kind, replace(default_pair(), gpu="NVIDIA H200", peer="NVIDIA H200").kind
        ('any GPU', 'NVIDIA H200 to NVIDIA H200')
        """
        return f"{self.gpu or ANY_PEER} to {self.peer}" if self.peer else self.gpu or ANY_PEER


def route_paths(route: str) -> tuple[str, ...]:
    """Return the paths that move bytes of a route. The staged path needs a side in host memory.

    >>> route_paths("load"), route_paths("push")
    (('kernel', 'copy_engine', 'copy_engine_2d', 'staged'), ('kernel', 'copy_engine', 'copy_engine_2d'))
    """
    return tuple(path for path in TERMS if path != "staged" or route in HOST_ROUTES)


@cache
def default() -> DeviceProfile:
    """Return a conservative guess of a GPU's costs: PCIe 4, rounded from measurements of an H100 and an A30.

    To and from the host, the kernel moves small runs, the copy engine large runs, and the staged path runs of middle
    size. Within the GPU, the kernel moves all runs. Beside prefill, a kernel waits for an SM.
    """
    return from_json(_guess("default"))


@cache
def default_pair() -> DeviceProfile:
    """Return a conservative guess of the costs between two GPUs that NVLink connects: the kernel moves all runs.

    Over PCIe, all paths are slower by the same factor if runs are large, so the choice is the same.
    """
    return from_json(_guess("default-pair"))


def _guess(name: str) -> str:
    return (PROFILES / f"{name}.json").read_text()


def from_json(text: str) -> DeviceProfile:
    """Read a profile from JSON.

    Raises:
        KVPlanError: the text is not JSON, has another schema or version, or a value is missing or wrong.

    >>> from_json(default().to_json()) == default(), from_json(default_pair().to_json()) == default_pair()
    (True, True)
    """
    made = values_of(text, "device profile", lambda found: _guess("default-pair" if found.get("peer") else "default"))
    costs, beside = made["costs"], made["beside"]
    made["costs"] = {route: {path: PathCosts(**costs[route][path]) for path in costs[route]} for route in costs}
    made["beside"] = {
        kind: {route: {path: Beside(**paths[path]) for path in paths} for route, paths in routes.items()}
        for kind, routes in beside.items()
    }
    return DeviceProfile(**made)


def values_of(text: str, what: str, guess: Callable[[dict[str, Any]], str]) -> dict[str, Any]:
    """Read a JSON object that has at least the keys of another one, values of the same types, and numbers up to 1e15.

    Args:
        text: the JSON text.
        what: the object in words.
        guess: returns the text of the other one, of which schema and version are the same, too.

    Raises:
        KVPlanError: the text is no such object.
    """
    document = json_of(text)
    document = document if isinstance(document, dict) else {}
    like = json.loads(guess(document))
    schema, version = like.pop("schema"), like.pop("version")
    if document.get("schema") != schema:
        raise KVPlanError(f"no {what}: its schema is not {schema!r}")
    if document.get("version") != version:
        raise KVPlanError(f"version {quoted(document.get('version'))}, and {version} is read here: calibrate again")
    try:
        return {name: _checked(document[name], one) for name, one in like.items()}
    except (KeyError, TypeError, ValueError) as error:
        raise KVPlanError(f"a value of the {what} is missing or wrong: {quoted(str(error))}") from None


def _checked(value: Any, like: Any) -> Any:
    if isinstance(like, dict):
        return {name: _checked(value[name], one) for name, one in like.items()}
    if isinstance(like, list):
        return tuple(_checked(one, "") for one in value)
    if type(like) in (int, float) or (like is None and value is not None):  # None stands for a number not known
        if type(value) not in (int, float) or not 0 <= value <= MOST:  # nan is not
            raise ValueError(f"{value!r} is no number from 0 to {MOST:g}")
        return float(value) if type(like) is float else int(value)
    if type(value) is not type(like):
        raise ValueError(f"{value!r} is of another type than {like!r}")
    return value
