"""The samples that a GPU of known costs would give a calibration."""

from __future__ import annotations

from kvplan.cost.model import total
from kvplan.cost.policy import HOST_ROUTES, OVERLAPS, PEER_ROUTES
from kvplan.cost.profile import GPU_ROUTES, TERMS, default, default_pair, route_paths
from kvplan.cost.statistics import LARGE
from kvplan.cuda.machine import Link, Machine
from kvplan.measure.calibrate import BESIDE_GRID, ONE_PROGRAM, ROUNDS, Point, geometries, measured_paths
from kvplan.measure.rig import Timing
from kvplan.measure.workload import Geometry

H100 = Machine("NVIDIA H100", "580.1", Link(1, 16, 5, 16), 13000, "0000:0f:00.0", 0)
CEILINGS = {"load": 50.0, "store": 40.0, "device": 2000.0, "sm_load": 45.0, "sm_store": 32.0, "sm_device": 1900.0,
            "memory": 4000.0}  # fmt: skip
PAIR_CEILINGS = {"push": 390.0, "pull": 380.0, "sm_push": 360.0, "sm_pull": 350.0}
ALL_CEILINGS = CEILINGS | PAIR_CEILINGS
# Nanoseconds a term, as made up; a byte of large pieces costs what the ceiling says.
KNOWN = {
    "kernel": {"fixed": 12_000.0, "run": 3.0, "byte": 0.0},
    "copy_engine": {"fixed": 9000.0, "small_copy": 1100.0, "large_copy": 420.0, "byte": 0.0},
    "copy_engine_2d": {"fixed": 21_000.0, "call": 2500.0, "row": 70.0, "byte": 0.0},
    "staged": {"fixed": 35_000.0, "small_extent": 1300.0, "large_extent": 600.0, "byte": 0.0},
    ONE_PROGRAM: {"fixed": 14_000.0, "run": 5.0, "byte": 0.12},
}  # fmt: skip
BETWEEN = {"peer": "NVIDIA H200", "nvlinks": 18}
GRIDS = {"host": HOST_ROUTES, "within": ("device",), "between": PEER_ROUTES}


def known(name: str, route: str) -> dict[str, float]:
    terms, ceiling = KNOWN[name], f"sm_{route}" if name == "kernel" else route
    return terms if name == ONE_PROGRAM else terms | {list(terms)[-1]: 1 / ALL_CEILINGS[ceiling]}


def program(route: str) -> dict[str, float]:
    """One program's costs, which are measured for loads and stores."""
    guess = default_pair() if route in PEER_ROUTES else default()
    return KNOWN[ONE_PROGRAM] if route in HOST_ROUTES else guess.costs[route]["kernel"].program


WAIT = 150_000.0  # nanoseconds that a transfer beside compute waits


def terms_of(one: Geometry, path: str) -> tuple[float, ...]:
    """Its counts, where a block that is contiguous on the host is one extent."""
    block = one.run_nbytes * one.block_runs
    extents, nbytes = (one.blocks, block) if one.host == "contiguous" else (one.runs, one.run_nbytes)
    return (
        1.0,
        *{
            "kernel": (one.runs,),
            "copy_engine": (one.runs, 0) if one.run_nbytes < LARGE else (0, one.runs),
            "copy_engine_2d": (2 * one.blocks, one.runs),
            "staged": (extents, 0) if nbytes < LARGE else (0, extents),
        }[path],
        one.nbytes,
    )


def samples(names=None, routes=GPU_ROUTES, count: int | None = None) -> list[Point]:
    """What a GPU of the known costs would give: by the clock 60 us more."""
    made = []
    for route in routes:
        grid = next(grid for grid in GRIDS.values() if route in grid)
        for one in [one for one in geometries(*grid) if one.direction == route][:count]:
            for name in measured_paths(route, one.runs):
                if names is None or name in names:
                    path = name.split(",")[0]
                    terms = terms_of(one, path)
                    seconds = total(terms, known(name, route), TERMS[path])
                    made.append(Point(name, route, one.nbytes, terms, Timing(seconds, seconds + 60e-6, 25e-6, 8)))
    return made


def beside(routes=GPU_ROUTES) -> list[Point]:
    """The same beside compute, which loses a fifth of its speed while bytes move."""
    made = []
    for route in routes:
        for run_nbytes, runs in BESIDE_GRID:
            one = Geometry(route, "contiguous", run_nbytes, runs, ROUNDS[0])
            for path in route_paths(route):
                terms = terms_of(one, path)
                seconds = total(terms, known(path, route), TERMS[path])
                begun = (known(path, route)["fixed"] + 60_000 + WAIT) * 1e-9
                wall = seconds + 60e-6 + WAIT * 1e-9
                slower = 1 / (1 - (1 - begun / wall) / 5)
                made += [Point(path, route, one.nbytes, terms, Timing(0.0, wall, 0.0, 8), kind, slower)
                         for kind in OVERLAPS[1:]]  # fmt: skip
    return made
