"""A profile from measured samples: the costs of each path and route are fitted to them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import NamedTuple

from kvplan.base.version import __version__
from kvplan.cost.model import features
from kvplan.cost.policy import BESIDE_COMPUTE, HOST_ROUTES, ROUTES
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
from kvplan.cost.statistics import Statistics
from kvplan.cuda.machine import Machine
from kvplan.errors import KVPlanError
from kvplan.measure.calibration.fit import fit
from kvplan.measure.timing import Timing

ONE_PROGRAM, FEW_PROGRAMS = "kernel, 1 program", "kernel, as beside compute"
ENGINE_PATHS = ("copy_engine", "copy_engine_2d", "staged")
# Transfers of fewer bytes between GPU memories show no ceiling: a GPU's cache holds a part of them.
LARGE_NBYTES = 256 << 20
LEAST_SAMPLES = 6  # samples per path and route; with fewer, the costs are guessed


class Sample(NamedTuple):
    """The time of one path for one plan.

    Attributes:
        path: name of the path, or :data:`ONE_PROGRAM` or :data:`FEW_PROGRAMS`.
        plan: statistics of the plan that was moved.
        timing: median times of its transfers.
    """

    path: str
    plan: Statistics
    timing: Timing


def ceilings_of(samples: Sequence[Sample], found: Mapping[str, float]) -> dict[str, float]:
    """Return GB/s that no transfer exceeded: the measured ceilings, or the fastest transfer if it was faster.

    Another process may have used the link while ceilings were measured. The kernel sets ``"sm_load"`` and the like.
    """
    made = dict(found)
    for route in (route for route in ROUTES if route in found):
        some = [one for one in samples if one.plan.route == route and one.timing.seconds > 0]
        engine, kernel = ([one for one in some if one.path in paths] for paths in (ENGINE_PATHS, ("kernel",)))
        launch = 0.0
        if route not in HOST_ROUTES:
            # The time of the smallest transfer is the time of a launch: 15 us of 280 us, if a GPU copies 512 MiB.
            launch = min((one.timing.seconds for one in kernel), default=0.0)
            engine, kernel = ([one for one in few if one.plan.nbytes >= LARGE_NBYTES] for few in (engine, kernel))
        for name, few, fixed in ((route, engine, 0.0), (f"sm_{route}", kernel, launch)):
            rates = [one.plan.nbytes / (one.timing.seconds - fixed) / 1e9 for one in few if one.timing.seconds > fixed]
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
            ceiling = ceilings_found.get(f"sm_{route}" if path == "kernel" else route)
            if len(some) < LEAST_SAMPLES or not ceiling:
                unknown.append(f"{route} {path}")
                costs[route][path] = guess.costs[route][path]
                continue
            seconds, wall = (_costs(some, path, target, 1 / ceiling) for target in range(2))
            program: Costs = {}
            if path == "kernel":
                program = _program(samples, route, multiprocessors) or guess.costs[route][path].program
            costs[route][path] = PathCosts(seconds, wall, _costs(some, path, 2), program)
    if len(unknown) == sum(len(paths) for paths in costs.values()):
        raise KVPlanError("too little could be measured in time; is the GPU busy with something else?")
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
        guessed=tuple(unknown), peer=peer, nvlinks=nvlinks,
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
