"""Device profiles: measured costs of each path for one GPU, or for one GPU and its peer; and guesses of them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from kvplan.base.limits import LIMITS
from kvplan.base.quoting import quoted
from kvplan.base.reading import json_of
from kvplan.cost.policy import HOST_ROUTES, OVERLAPS, PEER_ROUTES
from kvplan.errors import KVPlanError, LayoutError

SCHEMA, VERSION = "kvplan.profile", 2
PROFILES = Path(__file__).parent / "profiles"  # those that kvplan ships
MOST_FACTOR = 1e3
MOST = 1e15  # the largest number in a profile, so that sums of products stay finite
GUESSED = "default"  # measured nowhere
HOWS = ("calibrated", "shipped", GUESSED)
GPU_ROUTES = (*HOST_ROUTES, "device")  # routes of a GPU's own profile; a pair's profile has PEER_ROUTES
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

    >>> default().routes, sorted(default().costs["load"])
    (('load', 'store', 'device'), ['copy_engine', 'copy_engine_2d', 'kernel', 'staged'])
    >>> default_pair().routes, sorted(default_pair().costs["push"])
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
        return json.dumps({"schema": SCHEMA, "version": VERSION, **_rounded(asdict(self))}, indent=1) + "\n"

    @property
    def link(self) -> str:
        """Return the link in words.

        >>> from dataclasses import replace
        >>> default().link, replace(default_pair(), nvlinks=18).link, replace(default_pair(), nvlinks=0).link
        ('a link not known', 'NVLink, 18 links', 'PCIe')
        """
        if self.peer:
            if self.nvlinks is None:
                return "a link not known"
            return f"NVLink, {self.nvlinks} link{'s' * (self.nvlinks > 1)}" if self.nvlinks else "PCIe"
        if self.generation is None or self.width is None:
            return "a link not known"
        return f"PCIe {self.generation} x{self.width}"

    @property
    def routes(self) -> tuple[str, ...]:
        """Return the routes of the profile: three of a GPU, or two of a pair."""
        return PEER_ROUTES if self.peer else GPU_ROUTES

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


def ceiling_names(routes: Iterable[str]) -> tuple[str, ...]:
    """Return the names of a profile's ceilings.

    >>> ceiling_names(("push", "pull"))
    ('push', 'pull', 'sm_push', 'sm_pull')
    """
    routes = tuple(routes)
    return (*routes, *(f"sm_{route}" for route in routes), *(("memory",) if "device" in routes else ()))


def _rounded(value: Any) -> Any:
    """Round numbers to five digits, since no measurement is more precise."""
    if isinstance(value, dict):
        return {name: _rounded(held) for name, held in value.items()}
    return float(f"{value:.5g}") if isinstance(value, float) else value


@cache
def default() -> DeviceProfile:
    """Return a conservative guess of a GPU's costs: PCIe 4, rounded from measurements of an H100 and an A30.

    To and from the host, the kernel moves small runs, the copy engine large runs, and the staged path runs of middle
    size. Within the GPU, the kernel moves all runs. Beside prefill, a kernel waits for an SM.
    """
    return from_json((PROFILES / "default.json").read_text())


@cache
def default_pair() -> DeviceProfile:
    """Return a conservative guess of the costs between two GPUs that NVLink connects: the kernel moves all runs.

    Over PCIe, all paths are slower by the same factor if runs are large, so the choice is the same.
    """
    return from_json((PROFILES / "default-pair.json").read_text())


def from_json(text: str) -> DeviceProfile:
    """Read a profile from JSON.

    Raises:
        KVPlanError: the text is not JSON, has another schema or version, or a value is missing or wrong.

    >>> from_json(default().to_json()) == default(), from_json(default_pair().to_json()) == default_pair()
    (True, True)
    """
    document = document_of(text, SCHEMA, VERSION, "device profile")
    try:
        return _profile(document)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise KVPlanError(f"a value of the device profile is missing or wrong: {quoted(str(error))}") from None


def document_of(text: str, schema: str, version: int, what: str) -> dict[str, Any]:
    """Read a JSON object of a schema and a version.

    Raises:
        KVPlanError: the text is no such object.
    """
    if len(text) > LIMITS.profile_nbytes:
        raise KVPlanError(f"more than {LIMITS.profile_nbytes:,} bytes")
    try:
        document = json_of(text)
    except LayoutError as error:
        raise KVPlanError(f"no JSON: {error}") from None
    if not isinstance(document, dict) or document.get("schema") != schema:
        raise KVPlanError(f"no {what}: its schema is not {schema!r}")
    if (found := document.get("version")) != version:
        newer = isinstance(found, int) and found > version
        what = "newer than" if newer else "older than"
        raise KVPlanError(f"version {quoted(found)}, {what} {version}, which is read here"
                          f"{'' if newer else ': calibrate again'}")  # fmt: skip
    return document


def _profile(document: dict[str, Any]) -> DeviceProfile:
    peer = text_of(document.get("peer", ""))
    routes = PEER_ROUTES if peer else GPU_ROUTES
    if document["how"] not in HOWS:
        raise ValueError(f"how is {document['how']!r}")
    facts: dict[str, Any] = {name: text_of(document.get(name, "")) for name in ("gpu", "driver", "how", "made", "note")}
    facts |= {name: _whole(document.get(name)) for name in ("generation", "width", "nvlinks")}
    return DeviceProfile(
        **facts,
        multiprocessors=_whole(document.get("multiprocessors")) or 0,
        ceilings=_numbers(document["ceilings"], ceiling_names(routes)),
        costs={route: {path: _costs(document["costs"][route][path], path) for path in route_paths(route)}
               for route in routes},
        beside={kind: {route: {path: _beside(found[route][path], path) for path in route_paths(route)}
                       for route in routes} for kind in OVERLAPS[1:] for found in [document["beside"][kind]]},
        guessed=tuple(map(text_of, document.get("guessed", ()))), peer=peer,
    )  # fmt: skip


def number_of(value: Any, most: float = MOST) -> float:
    """Return a number from 0 to ``most``, or raise ValueError."""
    if type(value) not in (int, float) or not 0 <= value <= most:  # nan is not
        raise ValueError(f"{value!r} is no number from 0 to {most:g}")
    return float(value)


def text_of(value: Any) -> str:
    """Return a text, or raise ValueError."""
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is no text")  # noqa: TRY004  # one kind of error for all values
    return value


def _whole(value: Any) -> Any:
    return None if value is None else int(number_of(value, LIMITS.number))


def _numbers(values: Any, names: Iterable[str]) -> dict[str, float]:
    return {name: number_of(values[name]) for name in names}


def _costs(values: Any, path: str) -> PathCosts:
    seconds, wall = (_numbers(values[target], TERMS[path]) for target in ("seconds", "wall"))
    return PathCosts(seconds, wall, _numbers(values["program"], TERMS[path]) if path == "kernel" else {})


def _beside(values: Any, path: str) -> Beside:
    slower = number_of(values["slower"], MOST_FACTOR)
    if slower < 1:
        raise ValueError(f"slower is {slower}, from 1 to {MOST_FACTOR:g}")
    return Beside(_numbers(values["wall"], TERMS[path]), slower)
