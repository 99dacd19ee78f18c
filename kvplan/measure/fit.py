"""A profile from measured points: the costs of each path and route are fitted to them, by least squares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from itertools import combinations
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvplan.base import __version__
from kvplan.cost.model import NS
from kvplan.cost.policy import HOST_ROUTES, OVERLAPS, ROUTES
from kvplan.cost.profile import (
    TERMS,
    Beside,
    Costs,
    DeviceProfile,
    PathCosts,
    default,
    default_pair,
    route_paths,
)
from kvplan.cuda.machine import Machine
from kvplan.errors import KVPlanError
from kvplan.measure.rig import Timing

Float64Array = NDArray[np.float64]
ONE_PROGRAM = "kernel, 1 program"  # of loads and stores
ENGINE_PATHS = ("copy_engine", "copy_engine_2d", "staged")
# Transfers of fewer bytes between GPU memories show no ceiling: a GPU's cache holds a part of them.
LARGE_NBYTES = 256 << 20
LEAST_SAMPLES, LEAST_BESIDE = 6, 4  # samples per path and route; with fewer, the costs are guessed
MOST_LOST = 0.9  # share of its speed that compute can lose


def fit(
    features: Sequence[Sequence[float]],
    seconds: Sequence[float],
    weights: Sequence[float],
    known: Mapping[int, float] | None = None,
) -> list[float]:
    """Return the costs, at least 0, for which ``features @ costs`` is nearest to ``seconds`` by weighted errors.

    Args:
        features: (n, terms) counts of each term in each sample.
        seconds: (n,) measured times.
        weights: (n,) factors of the errors; with 1 / seconds, equal relative errors count the same.
        known: costs of some terms, by position, which are not fitted.

    >>> [round(cost, 6) for cost in fit([[1, 10], [1, 20], [1, 40]], [12.0, 22.0, 42.0], [1, 1, 1])]
    [2.0, 1.0]
    """
    matrix, target, scale = (np.asarray(given, dtype=np.float64) for given in (features, seconds, weights))
    known = known or {}
    free = [k for k in range(matrix.shape[1]) if k not in known]
    costs = np.zeros(matrix.shape[1])
    costs[list(known)] = list(known.values())
    left = target - matrix @ costs
    costs[free] = _non_negative(matrix[:, free] * scale[:, None], left * scale)
    return [float(cost) for cost in costs]


def _non_negative(matrix: Float64Array, target: Float64Array) -> Float64Array:
    """Return the best least-squares solution without a negative number, over all subsets of columns."""
    columns = matrix.shape[1]
    norms = np.sqrt((matrix**2).sum(axis=0))
    used = [k for k in range(columns) if norms[k] > 0]
    best, least = np.zeros(columns), float(target @ target)
    for size in range(1, len(used) + 1):
        for chosen in combinations(used, size):
            some = matrix[:, chosen] / norms[list(chosen)]
            found = np.linalg.lstsq(some, target, rcond=None)[0]
            if (found < 0).any():
                continue
            missed = some @ found - target
            error = float(missed @ missed)
            if error < least:
                least, best = error, np.zeros(columns)
                best[list(chosen)] = found / norms[list(chosen)]
    return best


def relative(features: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """Return the costs for which equal errors relative to the measured times count the same; see :func:`fit`."""
    return fit(features, seconds, [1 / one for one in seconds])


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


def ceilings_of(samples: Sequence[Point], found: Mapping[str, float]) -> dict[str, float]:
    """Return GB/s that no transfer exceeded: the measured ceilings, or the fastest transfer if it was faster.

    Another process may have used the link while ceilings were measured. The kernel sets ``"sm_load"`` and the like.
    """
    made = dict(found)
    for route in (route for route in ROUTES if route in found):
        some = [one for one in samples if (one.route, one.compute) == (route, "idle") and one.timing.seconds > 0]
        engine, kernel = ([one for one in some if one.path in paths] for paths in (ENGINE_PATHS, ("kernel",)))
        launch = 0.0
        if route not in HOST_ROUTES:
            # The time of the smallest transfer is the time of a launch: 15 us of 280 us, if a GPU copies 512 MiB.
            launch = min((one.timing.seconds for one in kernel), default=0.0)
            engine, kernel = ([one for one in few if one.nbytes >= LARGE_NBYTES] for few in (engine, kernel))
        for name, few, fixed in ((route, engine, 0.0), (f"sm_{route}", kernel, launch)):
            rates = [one.nbytes / (one.timing.seconds - fixed) / 1e9 for one in few if one.timing.seconds > fixed]
            made[name] = max(made.get(name, 0.0), *rates, 0.0)
    return made


def profile_of(
    machine: Machine,
    samples: Sequence[Point],
    ceilings_found: Mapping[str, float],
    *,
    multiprocessors: int,
    peer: str = "",
    nvlinks: int | None = None,
) -> DeviceProfile:
    """Make a profile from samples. Costs with too few samples are the default's, and are listed as guessed.

    Args:
        machine: the machine of the GPU that was measured.
        samples, ceilings_found: the measured samples, and the ceilings in GB/s.
        multiprocessors: number of SMs.
        peer: name of the other GPU for the profile of a pair.
        nvlinks: number of NVLink links of the pair; None if it is not known.

    Raises:
        KVPlanError: every path has too few samples.
    """
    guess = default_pair() if peer else default()
    routes, unknown = tuple(guess.costs), []
    costs: dict[str, dict[str, PathCosts]] = {}
    beside: dict[str, dict[str, dict[str, Beside]]] = {kind: {route: {} for route in routes} for kind in OVERLAPS[1:]}
    for route in routes:
        costs[route] = {}
        for path in route_paths(route):
            mine = [one for one in samples if (one.path, one.route) == (path, route)]
            alone = costs[route][path] = _alone(mine, samples, path, route, ceilings_found, guess)
            if alone is guess.costs[route][path]:
                unknown.append(f"{route} {path}")
            for kind in beside:
                some = [one for one in mine if one.compute == kind]
                if len(some) < LEAST_BESIDE:
                    unknown.append(f"{kind} {route} {path}")
                    beside[kind][route][path] = guess_beside(
                        alone, guess.costs[route][path], guess.beside[kind][route][path]
                    )
                else:
                    beside[kind][route][path] = _beside(some, path, alone)
    if all(costs[route] == guess.costs[route] for route in routes):
        raise KVPlanError("too little could be measured in time; is the GPU busy with something else?")
    generation, width = (None, None) if peer else machine.link.key
    return DeviceProfile(
        gpu=machine.gpu, driver=machine.driver, generation=generation, width=width, how="calibrated",
        made=f"kvplan {__version__}, {datetime.now(UTC).date().isoformat()}, {len(samples)} samples",
        multiprocessors=multiprocessors,
        ceilings={name: ceilings_found.get(name) or guess.ceilings[name] for name in guess.ceilings},
        costs=costs, beside=beside,
        note=f"guessed, for want of samples: {'; '.join(unknown)}" if unknown else "",
        guessed=tuple(unknown), peer=peer, nvlinks=nvlinks,
    )  # fmt: skip


def _alone(
    mine: Sequence[Point], samples: Sequence[Point], path: str, route: str, ceilings: Mapping[str, float],
    guess: DeviceProfile,
) -> PathCosts:  # fmt: skip
    """Return the costs of a path without compute; the guess if there are too few samples."""
    some = [one for one in mine if one.compute == "idle"]
    ceiling = ceilings.get(f"sm_{route}" if path == "kernel" else route)
    if len(some) < LEAST_SAMPLES or not ceiling:
        return guess.costs[route][path]
    program = guess.costs[route][path].program
    one = [one for one in samples if (one.path, one.route) == (ONE_PROGRAM, route)]
    if path == "kernel" and len(one) >= LEAST_SAMPLES:
        program = _costs(one, path, 0)
    known = {len(TERMS[path]) - 1: 1 / ceiling}
    seconds, wall = (_costs(some, path, target, known) for target in range(2))
    # The GPU's events are within what the clock sees, whatever the noise makes of a term.
    return PathCosts({term: min(cost, wall[term]) for term, cost in seconds.items()}, wall, program)


def guess_beside(alone: PathCosts, guessed: PathCosts, beside: Beside) -> Beside:
    """Guess the costs of a path beside compute: it costs as much more as in a guess."""
    wall = {term: cost + max(beside.wall[term] - guessed.wall[term], 0.0) for term, cost in alone.wall.items()}
    return Beside(wall, beside.slower)


def _beside(some: Sequence[Point], path: str, alone: PathCosts) -> Beside:
    """Return the costs of a path beside compute.

    A call of the driver takes the CPU as long as without compute, so the cost of small copies and 2-D copies is known.
    The compute is slower in proportion to what moves, and not while a transfer waits to begin.
    """
    wall = _costs(some, path, 1, {} if path == "kernel" else {1: alone.wall[TERMS[path][1]]})
    moving = [NS * sum(a * b for a, b in zip(one.terms[1:], [*wall.values()][1:], strict=True)) / one.timing.wall
              for one in some]  # fmt: skip
    lost = [1 - 1 / max(one.slower, 1.0) for one in some]
    share = sum(a * b for a, b in zip(moving, lost, strict=True)) / max(sum(a * a for a in moving), 1e-12)
    return Beside(wall, 1 / (1 - min(share, MOST_LOST)))


def _costs(samples: Sequence[Point], path: str, target: int, known: Mapping[int, float] | None = None) -> Costs:
    """Fit the costs of a path's terms, in nanoseconds; errors count relative to the whole time.

    Args:
        samples: samples of one path and direction.
        path: name of the path.
        target: index of the fitted time in a :class:`Timing`.
        known: costs of some terms, by position, which are not fitted.
    """
    weights = [NS / one.timing.wall for one in samples]
    found = fit([one.terms for one in samples], [one.timing[target] * 1e9 for one in samples], weights, known)
    return dict(zip(TERMS[path], found, strict=True))
