"""The calibration, which makes the profile of a GPU, or of a GPU and its peer, from a few hundred short transfers.

A GPU takes at most 20 seconds, 384 MiB of pinned memory and about 1.4 GiB of GPU memory. A pair takes at most 15
seconds, and 256 MiB of each GPU's memory. Compute beside the transfers takes memory of its own. Where the caches of
numba and Triton are empty, loops and kernels are compiled first, which takes up to a minute more.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from functools import partial

from kvplan.cost.model import features
from kvplan.cost.policy import HOST_ROUTES, PEER_ROUTES, Policy
from kvplan.cost.profile import DeviceProfile, route_paths
from kvplan.cost.statistics import counted
from kvplan.cuda.machine import Machine
from kvplan.errors import KVPlanError, PathError
from kvplan.execute.executor import Executor
from kvplan.measure import ceilings
from kvplan.measure.beside import measure_beside
from kvplan.measure.calibration.geometries import (
    DEVICE_NBYTES,
    HOST_NBYTES,
    MANY_RUNS,
    PAIR_NBYTES,
    RING_NBYTES,
    WITHIN_NBYTES,
    geometries,
)
from kvplan.measure.calibration.profile_fit import ONE_PROGRAM, Sample, ceilings_of, profile_of
from kvplan.measure.flights import Line
from kvplan.measure.timing import Progress, silent, timed
from kvplan.measure.workload import Buffers, Work, work
from kvplan.plan.plan import Plan

# No transfer begins after SECONDS. The last BESIDE_SECONDS are for transfers beside compute, and WITHIN_SECONDS before
# them for transfers within the GPU.
SECONDS, WITHIN_SECONDS, BESIDE_SECONDS = 18.0, 3.0, 6.0
PAIR_SECONDS, PAIR_BESIDE_SECONDS = 14.0, 5.0
SAMPLES, CASE_SECONDS = 8, 0.015
GPU_CASE_SECONDS = 0.006  # between GPU memories, a transfer takes a tenth of the time
VERIFIED = 4  # the first works, of which every byte is compared


def calibrate(
    machine: Machine,
    device: str = "cuda:0",
    progress: Progress | None = None,
    *,
    seconds: float = SECONDS,
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
    with ExitStack() as stack:
        executors = _executors(stack, device)
        executors[ONE_PROGRAM] = stack.enter_context(Executor(device, Policy(path="kernel", max_programs=1)))
        tell(0.0, "compile")
        _prepare(host, executors, HOST_ROUTES)
        _prepare(within, executors, ("device",))
        until = time.perf_counter() + seconds
        tell(0.05, "ceilings")
        found = ceilings.measure(host) | ceilings.measure(within)
        samples = _samples(
            host, executors, HOST_ROUTES, until - BESIDE_SECONDS - WITHIN_SECONDS, _part(tell, 0.1, 0.55)
        )
        samples += _samples(within, executors, ("device",), until - BESIDE_SECONDS, _part(tell, 0.55, 0.7))
        buffers = dict.fromkeys(HOST_ROUTES, host) | {"device": within}
        tell(0.7, "beside compute")
        samples += measure_beside(buffers, executors, until)
    tell(1.0, "done")
    sms = ceilings.multiprocessors(device)
    return profile_of(machine, samples, ceilings_of(samples, found), multiprocessors=sms)


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
    buffers = Buffers(PAIR_NBYTES, device, peer=peer)
    with ExitStack() as stack:
        executors = _executors(stack, device, PEER_ROUTES[0])
        tell(0.0, "compile")
        _prepare(buffers, executors, PEER_ROUTES)
        until = time.perf_counter() + seconds
        tell(0.05, "ceilings")
        found = ceilings.measure(buffers)
        samples = _samples(buffers, executors, PEER_ROUTES, until - PAIR_BESIDE_SECONDS, _part(tell, 0.1, 0.7))
        tell(0.7, "beside compute")
        samples += measure_beside(dict.fromkeys(PEER_ROUTES, buffers), executors, until)
    tell(1.0, "done")
    sms = ceilings.multiprocessors(device)
    return profile_of(machine, samples, ceilings_of(samples, found), multiprocessors=sms, peer=peer_name,
                      nvlinks=nvlinks)  # fmt: skip


def _executors(stack: ExitStack, device: str, route: str = "load") -> dict[str, Executor]:
    """Open an executor for each path of a route."""
    policies = {path: Policy(path=path, staging_bytes=RING_NBYTES) for path in route_paths(route)}
    return {name: stack.enter_context(Executor(device, policy)) for name, policy in policies.items()}


def _prepare(buffers: Buffers, executors: Mapping[str, Executor], routes: tuple[str, ...]) -> None:
    """Compile the loops and kernels of the transfers to come: in an empty container, that takes longer than they do."""
    seen = set[tuple[str, str, int]]()
    for geometry in geometries(*routes):
        kind = geometry.direction, geometry.host, geometry.run_nbytes
        if kind in seen:
            continue
        seen.add(kind)
        moved = work(buffers, geometry)
        for name in executors.keys() & {*measured_paths(geometry.direction, geometry.runs)}:
            with suppress(PathError):
                executors[name].prepare(moved.plan)


def _samples(
    buffers: Buffers, executors: Mapping[str, Executor], routes: tuple[str, ...], until: float, tell: Progress
) -> list[Sample]:
    """Measure the grid of some routes until a time of ``time.perf_counter()``."""
    made: list[Sample] = []
    works = list(geometries(*routes))
    for k, geometry in enumerate(works):
        if time.perf_counter() > until:
            break
        route, runs = geometry.direction, geometry.runs
        tell(k / len(works), f"{route} of {runs} runs of {geometry.run_nbytes} bytes")
        some = {name: one for name, one in executors.items() if name in measured_paths(route, runs)}
        pace = CASE_SECONDS if route in HOST_ROUTES else GPU_CASE_SECONDS
        made += measure(work(buffers, geometry, k), some, verify=k < VERIFIED, seconds=pace, route=route)
    return made


def measured_paths(route: str, runs: int) -> tuple[str, ...]:
    """Return the names of the cases that are measured for a number of runs: the copy engine takes long for many.

    >>> measured_paths("load", 65_536), measured_paths("push", 65_536)
    (('kernel', 'staged'), ('kernel',))
    """
    paths = route_paths(route)
    if runs >= MANY_RUNS:
        return tuple(path for path in paths if not path.startswith("copy_engine"))
    return (*paths, ONE_PROGRAM) if route in HOST_ROUTES else paths


def _part(tell: Progress, first: float, last: float) -> Progress:
    """Return a progress function for a part of the whole."""
    return lambda share, step: tell(first + (last - first) * share, step)


def measure(
    moved: Work,
    executors: Mapping[str, Executor],
    *,
    verify: bool,
    seconds: float = CASE_SECONDS,
    most: int = SAMPLES,
    route: str = "",
) -> list[Sample]:
    """Time every path on one work. A path that refuses the work has no sample.

    Args:
        moved: the work to move.
        executors: executors by the path of the sample.
        verify: whether every byte is compared first.
        seconds, most: see :func:`kvplan.measure.timing.timed`.
        route: the plan's route, by default its direction.

    Raises:
        TransferError: a byte did not arrive.
    """
    cases = {}
    for name, executor in executors.items():
        begin, whole = partial(executor.submit, moved.plan), partial(_whole, executor, moved.plan)
        with suppress(PathError):  # compare the first transfer: before a second one, the ring has the bytes
            if verify:
                moved.verify(name, whole)
            else:
                whole()
            cases[name] = begin
    counts, route, nbytes = counted(moved.plan), route or moved.plan.direction, moved.plan.nbytes
    times = timed(cases, seconds=seconds, most=most, warm_ups=1)
    return [Sample(name, route, nbytes, features(name.split(",")[0], counts), timing) for name, timing in times.items()]


def _whole(executor: Executor, plan: Plan) -> None:
    executor.submit(plan).synchronize()
