"""The samples that a GPU of known costs would give a calibration."""

from __future__ import annotations

from kvplan.cost.model import features, total
from kvplan.cost.policy import BESIDE_COMPUTE, HOST_ROUTES, PEER_ROUTES
from kvplan.cost.profile import GPU_ROUTES, TERMS
from kvplan.cost.statistics import Pieces, Statistics
from kvplan.cuda.machine import Link, Machine
from kvplan.measure.calibrate import measured_paths
from kvplan.measure.calibration.geometries import geometries
from kvplan.measure.calibration.profile_fit import FEW_PROGRAMS, ONE_PROGRAM, Sample
from kvplan.measure.timing import Timing
from kvplan.measure.workload import Geometry

H100 = Machine("NVIDIA H100", "580.1", Link(1, 16, 5, 16), 13000, "0000:0f:00.0", 0)
CEILINGS = {"load": 50.0, "store": 40.0, "device": 2000.0, "sm_load": 45.0, "sm_store": 32.0, "sm_device": 1900.0,
            "memory": 4000.0}  # fmt: skip
PAIR_CEILINGS = {"push": 390.0, "pull": 380.0, "sm_push": 360.0, "sm_pull": 350.0}
ALL_CEILINGS = CEILINGS | PAIR_CEILINGS
FEW = BESIDE_COMPUTE.kernel("push", 132).programs  # of each route between GPU memories
# Nanoseconds a term, as made up; a byte of large pieces costs what the ceiling says.
KNOWN = {
    "kernel": {"fixed": 12_000.0, "run": 3.0, "byte": 0.0},
    "copy_engine": {"fixed": 9000.0, "small_copy": 1100.0, "small_byte": 0.03, "large_copy": 420.0, "large_byte": 0.0},
    "copy_engine_2d": {"fixed": 21_000.0, "call": 2500.0, "row": 70.0, "byte": 0.0},
    "staged": {"fixed": 35_000.0, "run": 0.0, "small_extent": 1300.0, "small_byte": 0.04, "large_extent": 600.0,
               "large_byte": 0.0},
    ONE_PROGRAM: {"fixed": 14_000.0, "run": 5.0, "byte": 0.12},
    FEW_PROGRAMS: {"fixed": 14_000.0, "run": 0.4, "byte": 0.003},  # together: less than a ceiling
}  # fmt: skip
BETWEEN = {"peer": "NVIDIA H200", "nvlinks": 18}
GRIDS = {"host": HOST_ROUTES, "within": ("device",), "between": PEER_ROUTES}


def known(name: str, route: str) -> dict[str, float]:
    terms, ceiling = KNOWN[name], f"sm_{route}" if name == "kernel" else route
    return terms if name in (ONE_PROGRAM, FEW_PROGRAMS) else terms | {list(terms)[-1]: 1 / ALL_CEILINGS[ceiling]}


def program(route: str) -> dict[str, float]:
    """One program's costs: those of the few programs beside compute, which share the work, times their number."""
    if route in HOST_ROUTES:
        return KNOWN[ONE_PROGRAM]
    return {term: cost * (1 if term == "fixed" else FEW) for term, cost in KNOWN[FEW_PROGRAMS].items()}


def plan_of(one: Geometry) -> Statistics:
    """Its statistics, where a block that is contiguous on the host is one extent."""
    runs, block = Pieces.of(one.runs, one.nbytes), Pieces.of(one.blocks, one.nbytes)
    extents = block if one.host == "contiguous" else runs
    layers = one.block_runs // 2
    return Statistics(one.direction, one.nbytes, 1, one.runs, 16, runs, 2 * one.blocks if layers > 1 else 0, one.runs,
                      Pieces(), extents, one.run_nbytes * one.block_runs)  # fmt: skip


def samples(names=None, routes=GPU_ROUTES, count: int | None = None) -> list[Sample]:
    """What a GPU of the known costs would give: by the clock 60 us more, of which 25 are the CPU's."""
    made = []
    for route in routes:
        grid = next(grid for grid in GRIDS.values() if route in grid)
        for one in [one for one in geometries(*grid) if one.direction == route][:count]:
            plan = plan_of(one)
            for name in measured_paths(route, one.runs):
                if names is None or name in names:
                    path = name.split(",")[0]
                    seconds = total(features(path, plan), known(name, route), TERMS[path])
                    made.append(Sample(name, plan, Timing(seconds, seconds + 60e-6, 25e-6 + 1e-9 * plan.runs, 8)))
    return made
