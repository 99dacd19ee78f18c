"""The calibration, which makes the profile of a GPU, or of a GPU and its peer, from a few hundred short transfers.

A GPU takes at most 20 seconds, 384 MiB of pinned memory and about 1.4 GiB of GPU memory. A pair takes at most 15
seconds, and 256 MiB of each GPU's memory. Compute beside the transfers takes memory of its own. Where the caches of
numba and Triton are empty, loops and kernels are compiled first, which takes up to a minute more. The costs of each
path and route are fitted to the measured points by least squares.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from datetime import UTC, datetime
from functools import partial
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np

from kvplan.base import __version__
from kvplan.cost.model import NS, features
from kvplan.cost.policy import HOST_ROUTES, OVERLAPS, PEER_ROUTES, ROUTES, Policy
from kvplan.cost.profile import TERMS, Beside, Costs, DeviceProfile, PathCosts, default, default_pair, route_paths
from kvplan.cost.statistics import counted
from kvplan.cuda.machine import Machine
from kvplan.errors import KVPlanError, PathError
from kvplan.execute.executor import Executor
from kvplan.measure.rig import KINDS, Compute, Line, Progress, Timing, silent, timed, window
from kvplan.measure.workload import HOSTS, Buffers, Geometry, Work, copy_rates, work

KIB, MIB = 1 << 10, 1 << 20
HOST_NBYTES, DEVICE_NBYTES = 384 * MIB, 64 * MIB  # buffers of loads and stores
RING_NBYTES = 84 * MIB  # the default
# Buffers of a GPU's memory, of which there are two. Within a GPU, 64 MiB would be in its cache, and take no longer than
# the launch.
WITHIN_NBYTES, PAIR_NBYTES = 512 * MIB, 256 * MIB
ROUNDS = (16, 64)  # runs per block: one round over the grid for each; a fit needs two values to separate the terms

# (bytes per run, runs): from transfers whose time is the fixed costs, to transfers whose time is the bytes.
HOST_SIZES = (512, 2 * KIB, 8 * KIB, 24 * KIB, 32 * KIB, 64 * KIB, 256 * KIB, MIB)
HOST_RUNS = (16, 64, 512, 4096, 16384)
HOST_GRID = tuple((size, runs) for runs in HOST_RUNS for size in HOST_SIZES if size * runs <= DEVICE_NBYTES)
MANY_RUNS = 65_536
HOST_MANY = ((128, MANY_RUNS), (512, MANY_RUNS), (KIB, MANY_RUNS))  # for paths whose runs cost almost nothing
# Every second one, from the second on, holds the transfers that show the ceiling.
GPU_SIZES, GPU_RUNS = (256, 512, 2 * KIB, 8 * KIB, 32 * KIB, 64 * KIB, MIB), (16, 256, 4096, MANY_RUNS)
GPU_GRID = tuple((size, runs) for runs in GPU_RUNS for size in GPU_SIZES)
# (bytes per run, runs) beside compute: the first ones tell most, if time is short.
BESIDE_GRID = (
    (512, 256), (8 * KIB, 4096), (64 * KIB, 64), (256 * KIB, 64), (512, 4096), (32 * KIB, 16), (8 * KIB, 256),
    (64 * KIB, 1024),
)  # fmt: skip
FEW_COPIES, SMALL = 256, 28 << 10  # the copy engine takes long for more copies of fewer bytes; their cost is known

# No transfer begins after SECONDS. The last BESIDE_SECONDS are for transfers beside compute, and WITHIN_SECONDS before
# them for transfers within the GPU.
SECONDS, WITHIN_SECONDS, BESIDE_SECONDS = 18.0, 3.0, 6.0
PAIR_SECONDS, PAIR_BESIDE_SECONDS = 14.0, 5.0
SAMPLES = 8
CASE_SECONDS, GPU_CASE_SECONDS = 0.015, 0.006  # between GPU memories, a transfer takes a tenth of the time
VERIFIED = 4  # the first works, of which every byte is compared
WARM_UPS = 2  # beside compute

ONE_PROGRAM = "kernel, 1 program"  # of loads and stores
ENGINE_PATHS = ("copy_engine", "copy_engine_2d", "staged")
# Transfers of fewer bytes between GPU memories show no ceiling: a GPU's cache holds a part of them.
LARGE_NBYTES = 256 * MIB
LEAST_SAMPLES, LEAST_BESIDE = 6, 4  # samples per path and route; with fewer, the costs are guessed
MOST_LOST = 0.9  # share of its speed that compute can lose


class Ground(NamedTuple):
    """Buffers, the routes between them, and the seconds from the start after which their grid ends."""

    buffers: Buffers
    routes: tuple[str, ...]
    until: float


class Point(NamedTuple):
    """The time of one path for one plan.

    Attributes:
        path: name of the path, or :data:`ONE_PROGRAM`.
        route: route of the plan that was moved.
        nbytes: its bytes.
        terms: its counts of the path's terms (:func:`kvplan.cost.model.features`).
        timing: median times of its transfers.
        compute: the compute beside it: one of :data:`kvplan.cost.policy.OVERLAPS`.
        slower: time of an iteration of this compute, divided by its time alone.
    """

    path: str
    route: str
    nbytes: int
    terms: tuple[float, ...]
    timing: Timing
    compute: str = "idle"
    slower: float = 1.0

    @classmethod
    def of(cls, path: str, moved: Work, timing: Timing, compute: str = "idle", slower: float = 1.0) -> Point:
        """Return the point of a work that was moved."""
        terms = features(path.partition(",")[0], counted(moved.plan))
        return cls(path, moved.geometry.direction, moved.plan.nbytes, terms, timing, compute, slower)


def calibrate(machine: Machine, device: str = "cuda:0", progress: Progress = silent) -> DeviceProfile:
    """Measure a GPU, alone and beside compute: loads, stores, and copies within its memory.

    Args:
        machine: the machine that the profile describes.
        device: name of the GPU for executors; torch is needed.
        progress: function that is called with the share that is done, and the step that begins.

    Raises:
        KVPlanError: no path has enough samples within the time; or a byte did not arrive.
    """
    progress(0.0, "memory")
    host, within = Buffers(DEVICE_NBYTES, device, HOST_NBYTES), Buffers(WITHIN_NBYTES, device, peer=device)
    grounds = [
        Ground(host, HOST_ROUTES, SECONDS - BESIDE_SECONDS - WITHIN_SECONDS),
        Ground(within, ("device",), SECONDS - BESIDE_SECONDS),
    ]
    return _profile(machine, device, grounds, progress, SECONDS)


def calibrate_pair(
    machine: Machine, device: str, peer: str, progress: Progress = silent, *, peer_name: str, nvlinks: int | None
) -> DeviceProfile:
    """Measure copies from a GPU to a peer and back, which the GPU makes, alone and beside compute on the GPU.

    Args:
        machine: the machine of the GPU.
        device, peer: names of the GPU for executors, and of the other GPU; torch is needed.
        progress: function that is called with the share that is done, and the step that begins.
        peer_name: name of the other GPU in the profile, such as ``"NVIDIA H200"``.
        nvlinks: number of NVLink links between the two; None if it is not known.

    Raises:
        KVPlanError: the GPU cannot reach the peer's memory; no path has enough samples within the time; or a byte did
            not arrive.
    """
    progress(0.0, "memory")
    Line(device, peer)  # opens the way
    ground = Ground(Buffers(PAIR_NBYTES, device, peer=peer), PEER_ROUTES, PAIR_SECONDS - PAIR_BESIDE_SECONDS)
    return _profile(machine, device, [ground], progress, PAIR_SECONDS, peer=peer_name, nvlinks=nvlinks)


def _profile(
    machine: Machine, device: str, grounds: Sequence[Ground], tell: Progress, seconds: float, **pair: Any
) -> DeviceProfile:
    """Compile, measure the points of all grounds, alone and beside compute, and fit."""
    import torch

    points, copies = list[Point](), dict[str, float]()
    with ExitStack() as stack:
        policies = {path: Policy(path=path, staging_bytes=RING_NBYTES) for path in route_paths(grounds[0].routes[0])}
        if grounds[0].routes == HOST_ROUTES:
            policies[ONE_PROGRAM] = Policy(path="kernel", max_programs=1)
        executors = {name: stack.enter_context(Executor(device, policy)) for name, policy in policies.items()}
        tell(0.0, "compile")
        for ground in grounds:
            _prepare(ground, executors)
        start = time.perf_counter()
        tell(0.05, "ceilings")
        for ground in grounds:
            copies |= copy_rates(ground.buffers, ground.routes)
        for ground in grounds:
            points += _alone(ground, executors, start, tell, seconds)
        tell(0.7, "beside compute")
        points += _beside(grounds, executors, start + seconds)
    tell(1.0, "done")
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return profile_of(machine, points, ceilings_of(points, copies), multiprocessors=processors, **pair)


def geometries(*routes: str) -> Iterator[Geometry]:
    """Yield the geometries of some routes, mixed: all to and from the host, all within a GPU, or all between GPUs.

    All kinds come early, so that they are measured even if time is short.
    """
    host = routes[0] in HOST_ROUTES
    nbytes = DEVICE_NBYTES if host else WITHIN_NBYTES if "device" in routes else PAIR_NBYTES
    grid = (*HOST_GRID[::2], *HOST_GRID[1::2], *HOST_MANY) if host else (*GPU_GRID[1::2], *GPU_GRID[::2])
    for block_runs in ROUNDS:
        for run_nbytes, runs in grid:
            if runs < block_runs or max(runs, 2 * block_runs) * run_nbytes > nbytes:  # a cache has two blocks or more
                continue
            if not host and block_runs > ROUNDS[0] and runs == MANY_RUNS:
                continue  # only 2-D copies depend on the blocks, and are not measured for as many runs
            for route in routes:
                for order in HOSTS[: None if host and runs < MANY_RUNS else 1]:
                    yield Geometry(route, order, run_nbytes, runs, block_runs)


def measured_paths(route: str, runs: int) -> tuple[str, ...]:
    """Return the names of the cases that are measured for a number of runs: the copy engine takes long for many.

    >>> measured_paths("load", 65_536), measured_paths("push", 65_536)
    (('kernel', 'staged'), ('kernel',))
    """
    paths = route_paths(route)
    if runs >= MANY_RUNS:
        return tuple(path for path in paths if not path.startswith("copy_engine"))
    return (*paths, ONE_PROGRAM) if route in HOST_ROUTES else paths


def _prepare(ground: Ground, executors: Mapping[str, Executor]) -> None:
    """Compile the loops and kernels of the transfers to come: in an empty container, that takes longer than they do."""
    kinds = {(one.direction, one.host, one.run_nbytes): one for one in reversed([*geometries(*ground.routes)])}
    for geometry in kinds.values():
        moved = work(ground.buffers, geometry)
        for name in executors.keys() & {*measured_paths(geometry.direction, geometry.runs)}:
            with suppress(PathError):
                executors[name].prepare(moved.plan)


def _alone(
    ground: Ground, executors: Mapping[str, Executor], start: float, tell: Progress, seconds: float
) -> Iterator[Point]:
    """Measure the grid of a ground without compute, until its time is over; a path that refuses a work has no point."""
    for k, geometry in enumerate(geometries(*ground.routes)):
        spent = time.perf_counter() - start
        if spent > ground.until:
            return
        route, runs = geometry.direction, geometry.runs
        tell(0.1 + 0.6 * min(spent / seconds, 1.0), f"{route} of {runs} runs of {geometry.run_nbytes} bytes")
        moved, ways = work(ground.buffers, geometry, k), {}
        for name in [name for name in executors if name in measured_paths(route, runs)]:
            begin = partial(executors[name].submit, moved.plan)
            with suppress(PathError):  # compare the first transfer: before a second one, the ring has the bytes
                if k < VERIFIED:
                    moved.verify(name, lambda begin=begin: begin().synchronize())  # type: ignore[misc]
                else:
                    begin().synchronize()
                ways[name] = begin
        pace = CASE_SECONDS if route in HOST_ROUTES else GPU_CASE_SECONDS
        times = timed(ways, seconds=pace, most=SAMPLES, warm_ups=1)
        yield from (Point.of(name, moved, timing) for name, timing in times.items())


def _beside(grounds: Sequence[Ground], executors: Mapping[str, Executor], until: float) -> Iterator[Point]:
    """Measure all paths beside each kind of compute, which runs on the GPU of the executors.

    Args:
        grounds: buffers with the bytes to move, and routes; at least one.
        executors: executors by path; the kernel's is not used, since its launches depend on the compute.
        until: time of ``time.perf_counter()`` after which no measurement of a path begins.
    """
    device = grounds[0].buffers.device
    with ExitStack() as stack:
        computes = {kind: Compute(device, *KINDS[kind]) for kind in OVERLAPS[1:]}
        kernels = {kind: stack.enter_context(Executor(device, Policy(path="kernel", overlap=kind)))
                   for kind in computes}  # fmt: skip
        cases = [(ground.buffers, Geometry(route, "contiguous", *size, ROUNDS[0]))
                 for size in BESIDE_GRID for ground in grounds for route in ground.routes]  # fmt: skip
        for buffers, geometry in cases:
            moved = work(buffers, geometry)
            for path in route_paths(geometry.direction):
                if path == "copy_engine" and geometry.runs > FEW_COPIES and geometry.run_nbytes < SMALL:
                    continue
                for kind, compute in computes.items():
                    if time.perf_counter() > until:
                        return
                    begin = partial((kernels[kind] if path == "kernel" else executors[path]).submit, moved.plan)
                    with suppress(PathError):  # a path that refuses the plan has no figures
                        for _ in range(WARM_UPS):
                            begin().synchronize()
                        taken = window(compute, begin)
                        timing = Timing(0.0, statistics.median(taken.transfers), 0.0, len(taken.transfers))
                        yield Point.of(path, moved, timing, kind, taken.mean_slowdown)


# The fit.


def fit(
    features: Sequence[Sequence[float]],
    seconds: Sequence[float],
    weights: Sequence[float],
    known: Mapping[int, float] | None = None,
) -> list[float]:
    """Return the costs, at least 0, for which ``features @ costs`` is nearest to ``seconds`` by weighted errors.

    It is the best least-squares solution without a negative number, over all subsets of terms.

    Args:
        features: (n, terms) counts of each term in each sample.
        seconds: (n,) measured times.
        weights: (n,) factors of the errors; with 1 / seconds, equal relative errors count the same.
        known: costs of some terms, by position, which are not fitted.

    >>> [round(cost, 6) for cost in fit([[1, 10], [1, 20], [1, 40]], [12.0, 22.0, 42.0], [1, 1, 1])]
    [2.0, 1.0]
    """
    matrix, target, scale = (np.asarray(values, dtype=np.float64) for values in (features, seconds, weights))
    costs, known = np.zeros(matrix.shape[1]), known or {}
    costs[list(known)] = list(known.values())
    target, matrix = (target - matrix @ costs) * scale, matrix * scale[:, None]
    norms = np.sqrt((matrix**2).sum(axis=0))
    free = [k for k in range(len(costs)) if norms[k] > 0 and k not in known]
    best, least = costs, float(target @ target)
    for chosen in (list(some) for size in range(len(free)) for some in combinations(free, size + 1)):
        columns = matrix[:, chosen] / norms[chosen]
        solved = np.linalg.lstsq(columns, target, rcond=None)[0]
        missed = columns @ solved - target
        if (solved >= 0).all() and missed @ missed < least:
            least, best = float(missed @ missed), costs.copy()
            best[chosen] = solved / norms[chosen]
    return [float(cost) for cost in best]


def relative(features: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """Return the costs for which equal errors relative to the measured times count the same; see :func:`fit`."""
    return fit(features, seconds, [1 / one for one in seconds])


def ceilings_of(points: Sequence[Point], copies: Mapping[str, float]) -> dict[str, float]:
    """Return GB/s that no transfer exceeded: of large copies, or of the fastest transfer if it was faster.

    Another process may have used the link while copies were measured. The kernel sets ``"sm_load"`` and the like.
    """
    ceilings = dict(copies)
    for route in (route for route in ROUTES if route in copies):
        idle = [one for one in points if (one.route, one.compute) == (route, "idle")]
        engine, kernel = ([one for one in idle if one.path in paths] for paths in (ENGINE_PATHS, ("kernel",)))
        launch = 0.0
        if route not in HOST_ROUTES:
            # The time of the smallest transfer is the time of a launch: 15 us of 280 us, if a GPU copies 512 MiB.
            launch = min((one.timing.seconds for one in kernel), default=0.0)
            engine, kernel = ([one for one in some if one.nbytes >= LARGE_NBYTES] for some in (engine, kernel))
        for name, some, fixed in ((route, engine, 0.0), (f"sm_{route}", kernel, launch)):
            rates = [one.nbytes / (one.timing.seconds - fixed) / 1e9 for one in some if one.timing.seconds > fixed]
            ceilings[name] = max(ceilings.get(name, 0.0), *rates, 0.0)
    return ceilings


def profile_of(
    machine: Machine, points: Sequence[Point], ceilings: Mapping[str, float], *, multiprocessors: int, peer: str = "",
    nvlinks: int | None = None,
) -> DeviceProfile:  # fmt: skip
    """Make a profile from points. Costs with too few points are the default's, and are listed as guessed.

    Args:
        machine: the machine of the GPU that was measured.
        points, ceilings: the measured points, and the ceilings in GB/s.
        multiprocessors: number of SMs.
        peer: name of the other GPU for the profile of a pair.
        nvlinks: number of NVLink links of the pair; None if it is not known.

    Raises:
        KVPlanError: every path has too few points.
    """
    guess, unknown = default_pair() if peer else default(), list[str]()
    costs: dict[str, dict[str, PathCosts]] = {route: {} for route in guess.costs}
    beside = {kind: {route: dict[str, Beside]() for route in costs} for kind in OVERLAPS[1:]}
    for route, path in [(way, path) for way in costs for path in route_paths(way)]:
        mine, guessed = [one for one in points if one.route == route], guess.costs[route][path]
        ceiling = ceilings.get(f"sm_{route}" if path == "kernel" else route)
        alone = costs[route][path] = _costs_alone(mine, path, ceiling, guessed)
        if alone is guessed:
            unknown.append(f"{route} {path}")
        for kind in beside:
            some = [one for one in mine if (one.path, one.compute) == (path, kind)]
            if len(some) < LEAST_BESIDE:
                unknown.append(f"{kind} {route} {path}")
                beside[kind][route][path] = guess_beside(alone, guessed, guess.beside[kind][route][path])
            else:
                beside[kind][route][path] = _costs_beside(some, path, alone)
    if costs == guess.costs:
        raise KVPlanError("too little could be measured in time; is the GPU busy with something else?")
    generation, width = (None, None) if peer else machine.link.key
    return DeviceProfile(
        gpu=machine.gpu, driver=machine.driver, generation=generation, width=width, how="calibrated",
        made=f"kvplan {__version__}, {datetime.now(UTC).date().isoformat()}, {len(points)} samples",
        multiprocessors=multiprocessors,
        ceilings={name: ceilings.get(name) or guess.ceilings[name] for name in guess.ceilings},
        costs=costs, beside=beside,
        note=f"guessed, for want of samples: {'; '.join(unknown)}" if unknown else "",
        guessed=tuple(unknown), peer=peer, nvlinks=nvlinks,
    )  # fmt: skip


def _costs_alone(mine: Sequence[Point], path: str, ceiling: float | None, guess: PathCosts) -> PathCosts:
    """Return the costs of a path without compute; the guess if there are too few points."""
    some, single = ([one for one in mine if (one.path, one.compute) == (name, "idle")] for name in (path, ONE_PROGRAM))
    if len(some) < LEAST_SAMPLES or not ceiling:
        return guess
    program = _costs(single, path, 0) if path == "kernel" and len(single) >= LEAST_SAMPLES else guess.program
    known = {len(TERMS[path]) - 1: 1 / ceiling}
    seconds, wall = (_costs(some, path, target, known) for target in range(2))
    # The GPU's events are within what the clock sees, whatever the noise makes of a term.
    return PathCosts({term: min(cost, wall[term]) for term, cost in seconds.items()}, wall, program)


def guess_beside(alone: PathCosts, guessed: PathCosts, beside: Beside) -> Beside:
    """Guess the costs of a path beside compute: it costs as much more as in a guess."""
    wall = {term: cost + max(beside.wall[term] - guessed.wall[term], 0.0) for term, cost in alone.wall.items()}
    return Beside(wall, beside.slower)


def _costs_beside(some: Sequence[Point], path: str, alone: PathCosts) -> Beside:
    """Return the costs of a path beside compute.

    A call of the driver takes the CPU as long as without compute, so the cost of small copies and 2-D copies is known.
    The compute is slower in proportion to what moves, and not while a transfer waits to begin.
    """
    wall = _costs(some, path, 1, {} if path == "kernel" else {1: alone.wall[TERMS[path][1]]})
    prices = [NS * cost for cost in wall.values()][1:]
    moving = np.array([np.dot(one.terms[1:], prices) / one.timing.wall for one in some])
    lost = np.array([1 - 1 / max(one.slower, 1.0) for one in some])
    share = float(moving @ lost) / max(float(moving @ moving), 1e-12)
    return Beside(wall, 1 / (1 - min(share, MOST_LOST)))


def _costs(points: Sequence[Point], path: str, target: int, known: Mapping[int, float] | None = None) -> Costs:
    """Fit the costs of a path's terms to a time of :class:`Timing`, in nanoseconds; relative errors count."""
    weights = [NS / one.timing.wall for one in points]
    costs = fit([one.terms for one in points], [one.timing[target] * 1e9 for one in points], weights, known)
    return dict(zip(TERMS[path], costs, strict=True))
