"""How good choices are: the path that ``auto`` took against the best single path of every transfer. Pure."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from benchmarks.choice_pairs import PAIRS, Case
from kvplan.cost.model import candidates
from kvplan.cost.policy import Policy
from kvplan.cost.profile import TERMS, DeviceProfile
from kvplan.cost.statistics import Statistics
from kvplan.measure.workload import DIRECTIONS

SCHEMA, VERSION = "kvplan.choice", 3
NEAR, WORST = 1.05, 1.3  # times the best single path: limits for most points, and for all
SHARE = 0.95


class Point(NamedTuple):
    """One transfer of the grid, measured.

    Attributes:
        case: the transfer.
        plan: its statistics.
        walls: seconds from submit to the known end, by path; ``"auto"`` among them.
        seconds: from the first to the last event on the GPU, by path.
        taken: the path that ``auto`` took.
    """

    case: Case
    plan: Statistics
    walls: Mapping[str, float]
    seconds: Mapping[str, float]
    taken: str

    @property
    def best(self) -> float:
        """Wall seconds of the best single path."""
        return min(wall for path, wall in self.walls.items() if path in TERMS)


class Finding(NamedTuple):
    """How good choices are.

    Attributes:
        points: of the grid.
        near: share of points where the choice is within 5 % of the best single path.
        worst: the largest ratio of the choice to the best single path.
        at: the point of that ratio.
    """

    points: int
    near: float
    worst: float
    at: str


def regret(points: Sequence[Point], chosen: Mapping[Case, float]) -> Finding:
    """Judge choices by the best single path.

    Args:
        points: measured.
        chosen: wall seconds of the chosen path; a chosen path without a measurement, being hopeless, is not near.
    """
    ratios = {point.case: chosen[point.case] / point.best for point in points if point.case in chosen}
    at = max(ratios, key=lambda case: ratios[case])
    near = sum(ratio <= NEAR for ratio in ratios.values()) / len(points)
    return Finding(len(points), near, ratios[at], ", ".join(map(str, at)))


def by_profile(points: Sequence[Point], profile: DeviceProfile) -> dict[Case, str]:
    """The path that the model takes for each point, of the paths that were measured."""
    return {
        point.case: next(one.path for one in candidates(point.plan, profile, Policy()) if one.path in point.walls)
        for point in points
    }


def findings(points: Sequence[Point], profile: DeviceProfile) -> dict[str, Any]:
    """Judge all choices of a run. Pure."""
    walls = {point.case: point.walls for point in points}
    modelled = {case: walls[case][path] for case, path in by_profile(points, profile).items()}
    auto = {point.case: point.walls["auto"] for point in points}
    parts = {
        f"{pair}, {direction}": regret(some, auto)._asdict()
        for pair in PAIRS
        for direction in DIRECTIONS
        if (some := [point for point in points if point.case[:2] == (pair, direction)])
    }
    rule = {name: regret(points, {point.case: point.walls[name] for point in points if name in point.walls})
            for name in TERMS}  # fmt: skip
    off = [abs(math.log(one.wall / walls[point.case][one.path])) for point in points for one in
           candidates(point.plan, profile, Policy()) if one.path in point.walls]  # fmt: skip
    return {
        "auto": regret(points, auto)._asdict(),
        "parts": parts,
        "model": regret(points, modelled)._asdict(),
        "always": {name: one._asdict() for name, one in rule.items()},
        "prediction_error": math.expm1(sorted(off)[len(off) // 2]),
    }


def to_json(points: Sequence[Point], profile: DeviceProfile) -> str:
    """Write the file of a result."""
    from benchmarks.gpu.environment import gpu, versions

    rows = [_row(point) for point in points]
    about = {"gpu": gpu(), "versions": versions(), "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
    return json.dumps({"schema": SCHEMA, "version": VERSION, **about, "findings": findings(points, profile),
                       "profile": json.loads(profile.to_json()), "points": rows})  # fmt: skip


def _row(point: Point) -> dict[str, Any]:
    walls, seconds = (
        {path: float(f"{held:.4g}") for path, held in some.items()} for some in (point.walls, point.seconds)
    )
    plan = asdict(point.plan)
    return {"case": point.case._asdict(), "plan": plan, "walls": walls, "seconds": seconds, "taken": point.taken}
