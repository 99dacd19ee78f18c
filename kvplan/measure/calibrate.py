"""The calibration, which makes the profile of a GPU, or of a GPU and its peer, from a few hundred short transfers.

A GPU takes at most 20 seconds, 384 MiB of pinned memory and about 1.4 GiB of GPU memory. A pair takes at most 15
seconds, and 256 MiB of each GPU's memory. Compute beside the transfers takes memory of its own. Where the caches of
numba and Triton are empty, loops and kernels are compiled first, which takes up to a minute more.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any, NamedTuple

from kvplan.cost.model import features
from kvplan.cost.policy import HOST_ROUTES, OVERLAPS, PEER_ROUTES, Policy
from kvplan.cost.profile import DeviceProfile, route_paths
from kvplan.cost.statistics import counted
from kvplan.cuda.machine import Machine
from kvplan.errors import KVPlanError, PathError
from kvplan.execute.executor import Executor
from kvplan.measure import baselines
from kvplan.measure.compute import KINDS, Compute, window
from kvplan.measure.fit import ONE_PROGRAM, Point, ceilings_of, profile_of
from kvplan.measure.rig import Line, Progress, Timing, silent, timed
from kvplan.measure.workload import HOSTS, Buffers, Geometry, Work, work

KIB, MIB = 1 << 10, 1 << 20
HOST_NBYTES, DEVICE_NBYTES = 384 * MIB, 64 * MIB  # buffers of loads and stores
RING_NBYTES = 84 * MIB  # the default
# Buffers of a GPU's memory, of which there are two. Within a GPU, 64 MiB would be in its cache, and take no longer than
# the launch.
WITHIN_NBYTES, PAIR_NBYTES = 512 * MIB, 256 * MIB
ROUNDS = (16, 64)  # runs per block: one round over the grid for each; a fit needs two values to separate the terms

# (bytes per run, runs): from transfers whose time is the fixed costs, to transfers whose time is the bytes.
HOST_GRID = tuple(
    (run_nbytes, runs)
    for runs in (16, 64, 512, 4096, 16384)
    for run_nbytes in (512, 2 * KIB, 8 * KIB, 24 * KIB, 32 * KIB, 64 * KIB, 256 * KIB, MIB)
    if run_nbytes * runs <= DEVICE_NBYTES
)
MANY_RUNS = 65_536
HOST_MANY = ((128, MANY_RUNS), (512, MANY_RUNS), (KIB, MANY_RUNS))  # for paths whose runs cost almost nothing
GPU_GRID = tuple(
    (run_nbytes, runs)
    for runs in (16, 256, 4096, MANY_RUNS)
    for run_nbytes in (256, 512, 2 * KIB, 8 * KIB, 32 * KIB, 64 * KIB, MIB)
)  # every second one, from the second on, holds the transfers that show the ceiling
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


class Ground(NamedTuple):
    """Buffers, the routes between them, and the share of the seconds after which their grid ends."""

    buffers: Buffers
    routes: tuple[str, ...]
    until: float


def calibrate(
    machine: Machine, device: str = "cuda:0", progress: Progress | None = None, *, seconds: float = SECONDS
) -> DeviceProfile:
    """Measure a GPU, alone and beside compute: loads, stores, and copies within its memory.

    Args:
        machine: the machine that the profile describes.
        device: name of the GPU for executors; torch is needed.
        progress: function that is called with the share that is done, and the step that begins.
        seconds: time in seconds after which no transfer begins, from the end of compiling.

    Raises:
        KVPlanError: no path has enough samples within the time; or a byte did not arrive.
    """
    tell = progress or silent
    tell(0.0, "memory")
    host, within = Buffers(DEVICE_NBYTES, device, HOST_NBYTES), Buffers(WITHIN_NBYTES, device, peer=device)
    grounds = [
        Ground(host, HOST_ROUTES, seconds - BESIDE_SECONDS - WITHIN_SECONDS),
        Ground(within, ("device",), seconds - BESIDE_SECONDS),
    ]
    return _profile(machine, device, grounds, tell, seconds)


def calibrate_pair(
    machine: Machine,
    device: str,
    peer: str,
    progress: Progress | None = None,
    *,
    peer_name: str,
    nvlinks: int | None,
    seconds: float = PAIR_SECONDS,
) -> DeviceProfile:
    """Measure copies from a GPU to a peer and back, which the GPU makes, alone and beside compute on the GPU.

    Args:
        machine: the machine of the GPU.
        device, peer: names of the GPU for executors, and of the other GPU; torch is needed.
        progress: function that is called with the share that is done, and the step that begins.
        peer_name: name of the other GPU in the profile, such as ``"NVIDIA H200"``.
        nvlinks: number of NVLink links between the two; None if it is not known.
        seconds: time in seconds after which no transfer begins, from the end of compiling.

    Raises:
        KVPlanError: the GPU cannot reach the peer's memory; no path has enough samples within the time; or a byte did
            not arrive.
    """
    tell = progress or silent
    tell(0.0, "memory")
    why = Line(device).device.enable_peer(int(peer.removeprefix("cuda:")))
    if why:
        raise KVPlanError(why)
    ground = Ground(Buffers(PAIR_NBYTES, device, peer=peer), PEER_ROUTES, seconds - PAIR_BESIDE_SECONDS)
    return _profile(machine, device, [ground], tell, seconds, peer=peer_name, nvlinks=nvlinks)


def _profile(
    machine: Machine, device: str, grounds: Sequence[Ground], tell: Progress, seconds: float, **pair: Any
) -> DeviceProfile:
    """Compile, measure the points of all grounds, alone and beside compute, and fit."""
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
            copies |= baselines.copy_rates(ground.buffers, ground.routes)
        for ground in grounds:
            points += _alone(ground, executors, start, tell, seconds)
        tell(0.7, "beside compute")
        buffers = {route: ground.buffers for ground in grounds for route in ground.routes}
        points += _beside(buffers, executors, start + seconds)
    tell(1.0, "done")
    return profile_of(machine, points, ceilings_of(points, copies),
                      multiprocessors=baselines.multiprocessors(device), **pair)  # fmt: skip


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
    """Measure the grid of a ground without compute, until its time is over."""
    for k, geometry in enumerate(geometries(*ground.routes)):
        spent = time.perf_counter() - start
        if spent > ground.until:
            return
        route, runs = geometry.direction, geometry.runs
        tell(0.1 + 0.6 * min(spent / seconds, 1.0), f"{route} of {runs} runs of {geometry.run_nbytes} bytes")
        some = {name: one for name, one in executors.items() if name in measured_paths(route, runs)}
        pace = CASE_SECONDS if route in HOST_ROUTES else GPU_CASE_SECONDS
        yield from measure(work(ground.buffers, geometry, k), some, verify=k < VERIFIED, seconds=pace)


def measure(
    moved: Work, executors: Mapping[str, Executor], *, verify: bool, seconds: float = CASE_SECONDS, most: int = SAMPLES
) -> list[Point]:
    """Time every path on one work. A path that refuses the work has no point.

    Args:
        moved: the work to move.
        executors: executors by the path of the point.
        verify: whether every byte is compared first.
        seconds, most: see :func:`kvplan.measure.rig.timed`.

    Raises:
        TransferError: a byte did not arrive.
    """
    ways = {}
    for name, executor in executors.items():
        begin = partial(executor.submit, moved.plan)
        with suppress(PathError):  # compare the first transfer: before a second one, the ring has the bytes
            if verify:
                moved.verify(name, lambda begin=begin: begin().synchronize())  # type: ignore[misc]
            else:
                begin().synchronize()
            ways[name] = begin
    times = timed(ways, seconds=seconds, most=most, warm_ups=1)
    return [_point(name, moved, timing) for name, timing in times.items()]


def _beside(buffers: Mapping[str, Buffers], executors: Mapping[str, Executor], until: float) -> Iterator[Point]:
    """Measure all paths beside each kind of compute, which runs on the GPU of the executors.

    Args:
        buffers: buffers with the bytes to move, by route; at least one.
        executors: executors by path; the kernel's is not used, since its launches depend on the compute.
        until: time of ``time.perf_counter()`` after which no measurement of a path begins.
    """
    device = next(iter(buffers.values())).device
    with ExitStack() as stack:
        computes = {kind: Compute(device, *KINDS[kind]) for kind in OVERLAPS[1:]}
        kernels = {kind: stack.enter_context(Executor(device, Policy(path="kernel", overlap=kind)))
                   for kind in computes}  # fmt: skip
        for run_nbytes, runs in BESIDE_GRID:
            for route, whole in buffers.items():
                moved = work(whole, Geometry(route, "contiguous", run_nbytes, runs, ROUNDS[0]))
                for path in route_paths(route):
                    if path == "copy_engine" and runs > FEW_COPIES and run_nbytes < SMALL:
                        continue
                    for kind, compute in computes.items():
                        if time.perf_counter() > until:
                            return
                        executor = kernels[kind] if path == "kernel" else executors[path]
                        begin = partial(executor.submit, moved.plan)
                        with suppress(PathError):  # a path that refuses the plan has no figures
                            for _ in range(WARM_UPS):
                                begin().synchronize()
                            taken = window(compute, begin)
                            timing = Timing(0.0, statistics.median(taken.transfers), 0.0, len(taken.transfers))
                            yield _point(path, moved, timing)._replace(compute=kind, slower=taken.mean_slowdown)


def _point(name: str, moved: Work, timing: Timing) -> Point:
    terms = features(name.split(",", maxsplit=1)[0], counted(moved.plan))
    return Point(name, moved.geometry.direction, moved.plan.nbytes, terms, timing)
