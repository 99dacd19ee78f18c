"""A plan's statistics, and device profiles whose paths cost what a test says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvplan.cost.profile import (
    GPU_ROUTES,
    TERMS,
    Beside,
    DeviceProfile,
    PathCosts,
    default,
    default_programs,
    route_paths,
)
from kvplan.cost.statistics import Pieces, Statistics

PLAN = Statistics(
    "load", nbytes=1_000_000, groups=1, runs=100, alignment=16, copies=Pieces(40, 200_000, 10, 800_000),
    calls=5, rows=80, rowless=Pieces(20, 100_000, 0, 0), extents=Pieces(4, 50_000, 6, 950_000), granule_nbytes=100_000,
)  # fmt: skip


NOTHING_BESIDE = Beside(rate=1.0, slower=1.0)


def profile(costs: dict[str, tuple[float, ...]], beside: dict[str, Beside] | None = None, **changes) -> DeviceProfile:
    """One whose paths cost so many ns a term alone, 1,000 ns more by the clock, and 500 ns of CPU."""
    made = {}
    for path, terms in TERMS.items():
        seconds = dict(zip(terms, costs.get(path, (1e9,) + (0.0,) * (len(terms) - 1)), strict=True))
        nothing = dict.fromkeys(terms, 0.0)
        program = {"fixed": 2000.0, "run": 40.0, "byte": 0.04} if path == "kernel" else {}
        wall, cpu = seconds | {"fixed": seconds["fixed"] + 1000}, nothing | {"fixed": 500.0}
        made[path] = PathCosts(seconds, wall, cpu, program)
    every = dict.fromkeys(TERMS, NOTHING_BESIDE) | (beside or {})
    return replace(
        default(), multiprocessors=100, costs={route: _of(made, route) for route in GPU_ROUTES},
        ceilings={"load": 10.0, "store": 10.0, "sm_load": 20.0, "sm_store": 5.0, "device": 200.0,
                  "sm_device": 180.0, "memory": 400.0},
        beside={kind: {route: _of(every, route) for route in GPU_ROUTES} for kind in ("decode", "prefill")},
        programs=default_programs(GPU_ROUTES, 100), **changes,
    )  # fmt: skip


def _of(by_path: dict[str, Any], route: str) -> dict[str, Any]:
    return {path: by_path[path] for path in route_paths(route)}
