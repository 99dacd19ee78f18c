"""The calibration, which makes the profile of a GPU from a few hundred short transfers.

It takes at most 20 seconds, and 1 GiB of host and GPU memory together.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from datetime import UTC, datetime
from functools import partial
from typing import NamedTuple

from kvplan.base.version import __version__
from kvplan.cost.model import features
from kvplan.cost.policy import BESIDE_COMPUTE, HOST_ROUTES, ROUTES, Policy
from kvplan.cost.profile import (
    TERMS,
    Beside,
    Costs,
    DeviceProfile,
    PathCosts,
    default,
    default_pair,
    default_programs,
    route_paths,
)
from kvplan.cost.statistics import Statistics, statistics_of
from kvplan.cuda.machine import Machine
from kvplan.errors import KVPlanError, PathError
from kvplan.execute.executor import Executor
from kvplan.measure import ceilings
from kvplan.measure.beside import measure_beside
from kvplan.measure.fit import fit
from kvplan.measure.timing import Progress, Timing, silent, timed
from kvplan.measure.workload import HOSTS, Buffers, Geometry, Work, work
from kvplan.plan.plan import Plan

# No transfer begins after SECONDS. The last BESIDE_SECONDS of this time are for transfers beside compute.
SECONDS, BESIDE_SECONDS = 16.0, 4.0
HOST_NBYTES, DEVICE_NBYTES = 384 << 20, 64 << 20
RING_NBYTES = 84 << 20  # two chunks: half of the default ring
ROUNDS = (16, 64)  # runs per block: one round over the grid for each; a fit needs two values to separate the terms
PAIR_SECONDS = 14.0
CACHED_NBYTES = 256 << 20  # transfers of fewer bytes within a GPU are partly in its cache
ONE_PROGRAM, FEW_PROGRAMS = "kernel, 1 program", "kernel, as beside compute"
# (bytes per run, runs): from transfers whose time is the fixed costs, to transfers whose time is the bytes.
GRID = tuple(
    (run_nbytes, runs)
    for runs in (16, 64, 512, 4096, 16384)
    for run_nbytes in (512, 2 << 10, 8 << 10, 24 << 10, 32 << 10, 64 << 10, 256 << 10, 1 << 20)
    if run_nbytes * runs <= DEVICE_NBYTES
)
MANY = ((128, 65536), (512, 65536), (1 << 10, 65536))  # for the paths in FAST, whose runs cost almost nothing
FAST, ENGINE_PATHS = ("kernel", "staged"), ("copy_engine", "copy_engine_2d", "staged")
SAMPLES, CASE_SECONDS = 8, 0.015
LEAST_SAMPLES = 6  # samples per path and direction; with fewer, the costs are guessed


class Sample(NamedTuple):
    """The time of one path for one plan.

    Attributes:
        path: name of the path, or :data:`ONE_PROGRAM`.
        plan: statistics of the plan that was moved.
        timing: median times of its transfers.
    """

    path: str
    plan: Statistics
    timing: Timing


def calibrate(
    machine: Machine,
    device: str = "cuda:0",
    progress: Progress | None = None,
    *,
    keep: list[Sample] | None = None,
    seconds: float = SECONDS,
) -> DeviceProfile:
    """Measure a GPU, alone and beside compute.

    Args:
        machine: the machine that the profile describes.
        device: name of the GPU for executors; torch is needed.
        progress: function that is called with the share that is done, and the step that begins.
        keep: list to which the samples are appended.
        seconds: time in seconds after which no transfer begins.

    Raises:
        KVPlanError: no path has enough samples within the time; or a byte did not arrive.
    """
    tell = progress or silent
    until = time.perf_counter() + seconds
    tell(0.0, "memory")
    buffers = Buffers(DEVICE_NBYTES, device, HOST_NBYTES)
    tell(0.05, "ceilings")
    found = ceilings.measure(buffers)
    samples = []
    works = list(geometries())
    with ExitStack() as stack:
        executors = {
            path: stack.enter_context(Executor(device, Policy(path=path, staging_bytes=RING_NBYTES))) for path in TERMS
        }
        executors[ONE_PROGRAM] = stack.enter_context(Executor(device, Policy(path="kernel", max_programs=1)))
        for k, geometry in enumerate(works):
            tell(
                0.1 + 0.6 * k / len(works),
                f"{geometry.direction} of {geometry.runs} runs of {geometry.run_nbytes} bytes",
            )
            if time.perf_counter() > until - BESIDE_SECONDS:
                break
            some = {name: one for name, one in executors.items() if geometry.runs < MANY[0][1] or name in FAST}
            samples += measure(work(buffers, geometry, k), some, verify=k < 2 * len(HOSTS))
        beside = {}
        for kind, share in (("decode", 0.7), ("prefill", 0.85)):
            tell(share, f"beside {kind}")
            with Executor(device, Policy(path="kernel", overlap=kind)) as kernel:
                beside[kind] = measure_beside(buffers, executors | {"kernel": kernel}, kind, until)
    found = ceilings_of(samples, found)
    tell(1.0, "done")
    if keep is not None:
        keep += samples
    return profile_of(machine, samples, found, beside, multiprocessors=ceilings.multiprocessors(device))


def geometries() -> Iterator[Geometry]:
    """Yield the geometries to measure; the order mixes the kinds, so that all kinds are measured if time is short."""
    for block_runs in ROUNDS:
        for run_nbytes, runs in (*GRID[::2], *GRID[1::2], *MANY):
            if runs < block_runs or 2 * run_nbytes * block_runs > DEVICE_NBYTES:  # the device's side needs two blocks
                continue
            for direction in HOST_ROUTES:
                for host in HOSTS[: 1 if runs == MANY[0][1] else None]:
                    yield Geometry(direction, host, run_nbytes, runs, block_runs)


def measure(
    moved: Work, executors: dict[str, Executor], *, verify: bool, seconds: float = CASE_SECONDS, most: int = SAMPLES
) -> list[Sample]:
    """Time every path on one work. A path that refuses the work has no sample.

    Args:
        moved: the work to move.
        executors: executors by the path of the sample.
        verify: whether every byte is compared first.
        seconds, most: see :func:`kvplan.measure.timing.timed`.

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
    plan = statistics_of(moved.plan)
    return [Sample(name, plan, timing) for name, timing in timed(cases, seconds=seconds, most=most, warm_ups=1).items()]


def _whole(executor: Executor, plan: Plan) -> None:
    executor.submit(plan).synchronize()


def ceilings_of(samples: Sequence[Sample], found: Mapping[str, float]) -> dict[str, float]:
    """Return GB/s that no transfer exceeded: the measured ceilings, or the fastest transfer if it was faster.

    Another process may have used the link while ceilings were measured. The kernel sets ``"sm_load"`` and the like.
    Within a GPU, only large transfers count: the cache of the GPU holds small ones.
    """
    made = dict(found)
    for route in (route for route in ROUTES if route in found):
        some = [one for one in samples if one.plan.route == route and one.timing.seconds > 0]
        if route == "device":
            some = [one for one in some if one.plan.nbytes >= CACHED_NBYTES]
        for name, paths in ((route, ENGINE_PATHS), (f"sm_{route}", ("kernel",))):
            rates = [one.plan.nbytes / one.timing.seconds / 1e9 for one in some if one.path in paths]
            made[name] = max(made.get(name, 0.0), *rates, 0.0)
    return made


def profile_of(
    machine: Machine,
    samples: Sequence[Sample],
    ceilings_found: Mapping[str, float],
    beside: Mapping[str, Mapping[str, Mapping[str, Beside]]],
    *,
    multiprocessors: int,
    peer: str = "",
    nvlinks: int | None = None,
) -> DeviceProfile:
    """Make a profile from samples. Costs with too few samples are the default's, and are listed as guessed.

    Args:
        machine: the machine of the GPU that was measured.
        samples, ceilings_found: the measured samples, and the ceilings in GB/s.
        beside: measured effects of compute, by kind of compute, route and path.
        multiprocessors: number of SMs.
        peer: name of the other GPU for the profile of a pair.
        nvlinks: number of NVLink links of the pair; None if it is not known.

    Raises:
        KVPlanError: every path has too few samples.
    """
    guess = default_pair() if peer else default()
    routes, unknown = guess.routes, []
    costs: dict[str, dict[str, PathCosts]] = {}
    for route in routes:
        costs[route] = {}
        for path in route_paths(route):
            some = [one for one in samples if one.path == path and one.plan.route == route]
            if len(some) < LEAST_SAMPLES or not ceilings_found.get(route):
                unknown.append(f"{route} {path}")
                costs[route][path] = guess.costs[route][path]
                continue
            byte = 1 / max(ceilings_found[f"sm_{route}" if path == "kernel" else route], 1e-9)
            seconds, wall = (_costs(some, path, target, byte) for target in range(2))
            program: Costs = {}
            if path == "kernel":
                program = _program(samples, route, multiprocessors) or guess.costs[route][path].program
            costs[route][path] = PathCosts(seconds, wall, _costs(some, path, 2), program)
    if len(unknown) == sum(len(paths) for paths in costs.values()):
        raise KVPlanError(
            f"nothing could be measured within {PAIR_SECONDS if peer else SECONDS:.0f} seconds; "
            "is the GPU busy with something else?"
        )
    compute: dict[str, dict[str, dict[str, Beside]]] = {}
    for kind, guesses in guess.beside.items():
        compute[kind] = {}
        for route, paths in guesses.items():
            found = beside.get(kind, {}).get(route, {})
            unknown += [f"{kind} {route} {path}" for path in paths if path not in found]
            compute[kind][route] = {**paths, **found}
    generation, width = (None, None) if peer else machine.link.key
    return DeviceProfile(
        gpu=machine.gpu, driver=machine.driver, generation=generation, width=width, how="calibrated",
        made=f"kvplan {__version__}, {datetime.now(UTC).date().isoformat()}, {len(samples)} samples",
        multiprocessors=multiprocessors,
        ceilings={name: ceilings_found.get(name) or guess.ceilings[name] for name in guess.ceilings},
        costs=costs, beside=compute, programs=default_programs(routes, multiprocessors),
        note=f"guessed, for want of samples: {'; '.join(unknown)}" if unknown else "",
        calibrations=1, guessed=tuple(unknown), peer=peer, nvlinks=nvlinks,
    )  # fmt: skip


def _program(samples: Sequence[Sample], route: str, multiprocessors: int) -> Costs:
    """Return the costs of one Triton program, in nanoseconds; empty if there are too few samples.

    Loads and stores are measured with one program. For the other routes, a program beside compute has fewer warps and
    fewer bytes in flight than one that ``max_programs`` names. So they are measured as they run beside compute: the
    programs share the runs and the bytes.
    """
    alone = route in HOST_ROUTES
    some = [one for one in samples if one.path == (ONE_PROGRAM if alone else FEW_PROGRAMS) and one.plan.route == route]
    if len(some) < LEAST_SAMPLES:
        return {}
    count = 1 if alone else BESIDE_COMPUTE.kernel(route, multiprocessors).programs
    return {term: cost if term == "fixed" else cost * count for term, cost in _costs(some, "kernel", 0).items()}


def _costs(samples: Sequence[Sample], path: str, target: int, byte: float | None = None) -> Costs:
    """Fit the costs of a path's terms, in nanoseconds; errors count relative to the whole time.

    Args:
        samples: samples of one path and direction.
        path: name of the path.
        target: index of the fitted time in a :class:`Timing`.
        byte: nanoseconds per byte of large pieces, from the ceiling; None to fit it.
    """
    counts = [features(path, one.plan) for one in samples]
    known = {} if byte is None else {len(TERMS[path]) - 1: byte}
    if path == "staged":
        # Runs are copied while bytes cross the link. A fit would assign to them the cost of the small extents of the
        # same samples.
        known[TERMS[path].index("run")] = 0.0
    weights = [1e-9 / one.timing.wall for one in samples]
    found = fit(counts, [one.timing[target] * 1e9 for one in samples], weights, known)
    return dict(zip(TERMS[path], found, strict=True))
