"""Measurements of each path beside compute: the rate of the path, and how much slower compute becomes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from math import inf

from kvplan.cost.policy import HOST_ROUTES
from kvplan.cost.profile import Beside, route_paths
from kvplan.errors import PathError
from kvplan.execute.executor import Executor
from kvplan.measure.compute import Compute, compute_of, window
from kvplan.measure.timing import timed
from kvplan.measure.workload import Buffers, Geometry, work
from kvplan.plan.plan import Plan

WARM, ALONE, TRANSFERS, SECONDS = 100, 80, 4, 0.08
WARM_UPS = 2
BLOCK_RUNS = 32
# Bytes per run: a size that suits each path. The blocks are contiguous in the pool.
RUN_NBYTES = {"kernel": 8 << 10, "staged": 8 << 10, "copy_engine_2d": 16 << 10, "copy_engine": 128 << 10}
ENGINE_NBYTES = 64 << 20  # between GPU memories, the copy engine would take too long for all bytes of the buffers


def measure_beside(
    buffers: Mapping[str, Buffers], executors: Mapping[str, Executor], kind: str, until: float
) -> dict[str, dict[str, Beside]]:
    """Measure all paths beside one kind of compute, and return the effects by route and path.

    The compute runs on the GPU of the executors.

    Args:
        buffers: buffers with the bytes to move, by route; at least one.
        executors: executors by path.
        kind: ``"decode"`` or ``"prefill"``.
        until: time of ``time.perf_counter()`` after which no measurement of a path begins.
    """
    compute = compute_of(next(iter(buffers.values())).device, kind)
    made: dict[str, dict[str, Beside]] = {}
    for route, whole in buffers.items():
        made[route] = {}
        for path in route_paths(route):
            if time.perf_counter() > until:
                break
            part = whole
            if route not in HOST_ROUTES and path != "kernel":
                part = whole.front(min(ENGINE_NBYTES, whole.nbytes))
            size = RUN_NBYTES[path]
            geometry = Geometry(route, "contiguous", size, part.nbytes // size, BLOCK_RUNS)
            with suppress(PathError):  # a path that refuses the plan has no figures
                made[route][path] = _one(compute, executors[path], work(part, geometry).plan)
    return made


def _one(compute: Compute, executor: Executor, plan: Plan) -> Beside:
    begin = partial(executor.submit, plan)
    alone = timed({"alone": begin}, seconds=inf, most=TRANSFERS, warm_ups=WARM_UPS)["alone"].wall
    taken = window(compute, begin, warm=WARM, alone=ALONE, transfers=TRANSFERS, seconds=SECONDS)
    rate = alone / statistics.median(taken.transfers)
    return Beside(min(rate, 1.0), max(taken.slowdown, 1.0))
