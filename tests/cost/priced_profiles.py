"""A plan's counts, and device profiles whose paths cost what a test says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvplan.cost.profile import GPU_ROUTES, TERMS, Beside, DeviceProfile, PathCosts, default, route_paths
from kvplan.cost.statistics import Counted, GroupFacts

# Ten units of 100,000 bytes.
FACTS = GroupFacts(
    100_000, 16, 100_000,
    {"kernel": (10, 100_000), "copy_engine": (4, 1, 100_000), "copy_engine_2d": (2, 8, 100_000),
     "staged": (0.4, 0.6, 100_000)},
)  # fmt: skip
PLAN: list[Counted] = [(FACTS, 10)]


def profile(costs: dict[str, tuple[float, ...]], beside: dict[str, Beside] | None = None, **changes) -> DeviceProfile:
    """One whose paths cost so many ns a term, and 1,000 ns more by the clock; beside compute as alone."""
    made = {}
    for path, terms in TERMS.items():
        seconds = dict(zip(terms, costs.get(path, (1e9,) + (0.0,) * (len(terms) - 1)), strict=True))
        program = {"fixed": 2000.0, "run": 40.0, "byte": 0.04} if path == "kernel" else {}
        made[path] = PathCosts(seconds, seconds | {"fixed": seconds["fixed"] + 1000}, program)
    every = {path: Beside(one.wall, 1.0) for path, one in made.items()} | (beside or {})
    return replace(
        default(), multiprocessors=100, costs={route: _of(made, route) for route in GPU_ROUTES},
        ceilings={"load": 10.0, "store": 10.0, "sm_load": 20.0, "sm_store": 5.0, "device": 200.0,
                  "sm_device": 180.0, "memory": 400.0},
        beside={kind: {route: _of(every, route) for route in GPU_ROUTES} for kind in ("decode", "prefill")}, **changes,
    )  # fmt: skip


def _of(by_path: dict[str, Any], route: str) -> dict[str, Any]:
    return {path: by_path[path] for path in route_paths(route)}
