"""Device profiles: measured costs of each path for one GPU, or for one GPU and its peer; and guesses of them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from kvplan.cost.policy import HOST_ROUTES, OVERLAPS, PEER_ROUTES, Policy

SCHEMA, VERSION = "kvplan.profile", 1
GUESSED = "default"  # measured nowhere
HOWS = ("calibrated", "shipped", GUESSED)
GPU_ROUTES = (*HOST_ROUTES, "device")  # routes of a GPU's own profile; a pair's profile has PEER_ROUTES
ANY_PEER = "any GPU"  # the peer in a pair's profile that was measured nowhere

# The terms of each path. cost/model.py counts them in a plan; a profile has their costs in nanoseconds.
TERMS: dict[str, tuple[str, ...]] = {
    "kernel": ("fixed", "run", "byte"),
    "copy_engine": ("fixed", "small_copy", "small_byte", "large_copy", "large_byte"),
    "copy_engine_2d": ("fixed", "call", "row", "byte"),
    "staged": ("fixed", "run", "small_extent", "small_byte", "large_extent", "large_byte"),
}
Costs = Mapping[str, float]


@dataclass(frozen=True)
class PathCosts:
    """Costs of the terms of one path and direction, in nanoseconds; see :data:`TERMS`.

    Attributes:
        seconds: costs in the time from the first to the last event on the GPU.
        wall: costs in the time from the call of submit until the caller knows the end.
        cpu: costs in the time from the call of submit until a thread has issued all work.
        program: like ``seconds``, for the kernel path with one Triton program; empty for other paths. Between GPU
            memories, it is a program as it runs beside compute.
    """

    seconds: Costs
    wall: Costs
    cpu: Costs
    program: Costs = field(default_factory=dict)


@dataclass(frozen=True)
class Beside:
    """The effect of a path and compute on each other if both run at the same time.

    Attributes:
        rate: bandwidth of the path beside compute, divided by its bandwidth alone.
        slower: time of an iteration of compute beside the path, divided by its time alone.
    """

    rate: float
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
        beside: effects of compute by kind of compute (``"decode"``, ``"prefill"``), route and path.
        programs: Triton programs of the kernel path when it was measured, by route.
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
    programs: Mapping[str, int]
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


def default_programs(routes: Iterable[str], multiprocessors: int) -> dict[str, int]:
    """Return the Triton programs of the default policy's kernels, with which a calibration measures them.

    >>> default_programs(("store", "push"), 132)
    {'store': 8, 'push': 132}
    """
    return {route: Policy().kernel(route, max(multiprocessors, 1)).programs for route in routes}


def _rounded(value: Any) -> Any:
    """Round numbers to five digits, since no measurement is more precise."""
    if isinstance(value, dict):
        return {name: _rounded(held) for name, held in value.items()}
    return float(f"{value:.5g}") if isinstance(value, float) else value


# Nanoseconds of each path's terms in the time on the GPU, by route; and of one Triton program of the kernel.
_GUESSES: dict[str, dict[str, tuple[float, ...]]] = {
    # PCIe 4, and a driver whose small copies take long; rounded from measurements of an H100 and an A30.
    "host": {
        "kernel": (15e3, 1.0, 0.046),
        "copy_engine": (10e3, 1500.0, 0.042, 500.0, 0.042),
        "copy_engine_2d": (25e3, 3000.0, 100.0, 0.042),
        "staged": (40e3, 0.5, 1500.0, 0.042, 500.0, 0.042),
    },
    # Rounded from an H200. Within the GPU, the copy engine takes 3.8 us for a run of 64 KiB: 17 GB/s.
    "device": {
        "kernel": (15e3, 0.02, 0.00057),
        "copy_engine": (5e3, 1000.0, 0.06, 3700.0, 0.00054),
        "copy_engine_2d": (25e3, 3000.0, 1500.0, 0.00054),
    },
    # Rounded from two H200s, and slower by a quarter: 18 links of NVLink, 12.8 GB/s of the copy engine at 8 KiB.
    "peer": {
        "kernel": (15e3, 0.3, 0.0037),
        "copy_engine": (10e3, 610.0, 0.0033, 1000.0, 0.0033),
        "copy_engine_2d": (25e3, 3000.0, 1600.0, 0.0033),
    },
}
_PROGRAMS = {"host": (15e3, 4.0, 0.138), "device": (15e3, 8.0, 0.08), "peer": (15e3, 40.0, 0.08)}
_BEFORE = {"kernel": 50e3, "copy_engine": 70e3, "copy_engine_2d": 110e3, "staged": 100e3}  # ns until the GPU begins
_BESIDE = {
    "host": {"kernel": Beside(0.7, 1.08), "copy_engine": Beside(0.95, 1.04), "copy_engine_2d": Beside(0.95, 1.02),
             "staged": Beside(0.9, 1.06)},
    "device": {"kernel": Beside(0.7, 1.10), "copy_engine": Beside(0.9, 1.10), "copy_engine_2d": Beside(0.95, 1.04)},
    "peer": {"kernel": Beside(0.5, 1.08), "copy_engine": Beside(0.9, 1.10), "copy_engine_2d": Beside(0.95, 1.04)},
}  # fmt: skip
_NOTE = "a guess that was measured nowhere: run `kvplan calibrate{}`"


def default() -> DeviceProfile:
    """Return a conservative guess of a GPU's costs.

    To and from the host, the kernel moves small runs, the copy engine large runs, and the staged path runs of middle
    size. Within the GPU, the kernel moves all runs.
    """
    ceilings = {"load": 24.0, "store": 24.0, "device": 1850.0, "sm_load": 22.0, "sm_store": 22.0, "sm_device": 1750.0,
                "memory": 1000.0}  # fmt: skip
    return _guess(GPU_ROUTES, ceilings, note=_NOTE.format(""))


def default_pair() -> DeviceProfile:
    """Return a conservative guess of the costs between two GPUs that NVLink connects: the kernel moves all runs.

    Over PCIe, all paths are slower by the same factor if runs are large, so the choice is the same.
    """
    ceilings = {"push": 300.0, "pull": 300.0, "sm_push": 270.0, "sm_pull": 270.0}
    return _guess(PEER_ROUTES, ceilings, note=_NOTE.format(" --peer cuda:M"), peer=ANY_PEER)


def _guess(routes: tuple[str, ...], ceilings: dict[str, float], note: str, peer: str = "") -> DeviceProfile:
    kinds = {route: "host" if route in HOST_ROUTES else "peer" if route in PEER_ROUTES else route for route in routes}
    return DeviceProfile(
        gpu="", driver="", generation=None, width=None, how=GUESSED, made="kvplan, measured nowhere",
        multiprocessors=108, ceilings=ceilings,
        costs={route: {path: _guessed_costs(kind, path) for path in route_paths(route)}
               for route, kind in kinds.items()},
        beside={compute: {route: _BESIDE[kind] for route, kind in kinds.items()} for compute in OVERLAPS[1:]},
        programs=default_programs(routes, 108), note=note, peer=peer,
    )  # fmt: skip


def _guessed_costs(kind: str, path: str) -> PathCosts:
    terms = dict(zip(TERMS[path], _GUESSES[kind][path], strict=True))
    before = _BEFORE[path]
    program = dict(zip(TERMS[path], _PROGRAMS[kind], strict=True)) if path == "kernel" else {}
    return PathCosts(terms, terms | {"fixed": terms["fixed"] + before}, terms | {"fixed": before}, program)
