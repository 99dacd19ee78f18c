"""Measurements of each path beside compute: the rate of the path, and how much slower compute becomes."""

from __future__ import annotations

import statistics
import time
from contextlib import suppress
from functools import partial
from math import inf

from kvplan.cost.policy import HOST_ROUTES
from kvplan.cost.profile import Beside
from kvplan.errors import PathError
from kvplan.execute.executor import Executor
from kvplan.measure.compute import Compute, compute_of, window
from kvplan.measure.timing import timed
from kvplan.measure.workload import Buffers, Geometry, work
from kvplan.plan.plan import Plan

WARM, ALONE, TRANSFERS, SECONDS = 100, 80, 4, 0.08
WARM_UPS = 2
BLOCK_RUNS = 32
# Bytes per run: a size that suits each path. The blocks are contiguous on the host.
RUN_NBYTES = {"kernel": 8 << 10, "staged": 8 << 10, "copy_engine_2d": 16 << 10, "copy_engine": 128 << 10}


def measure_beside(
    buffers: Buffers, executors: dict[str, Executor], kind: str, until: float
) -> dict[str, dict[str, Beside]]:
    """Measure all paths beside one kind of compute, and return the effects by direction and path.

    Args:
        buffers: buffers with the bytes to move.
        executors: executors by path.
        kind: ``"decode"`` or ``"prefill"``.
        until: time of ``time.perf_counter()`` after which no measurement of a path begins.
    """
    compute = compute_of(buffers.device, kind)
    made: dict[str, dict[str, Beside]] = {}
    for direction in HOST_ROUTES:
        made[direction] = {}
        for path, run_nbytes in RUN_NBYTES.items():
            if time.perf_counter() > until:
                break
            geometry = Geometry(direction, "contiguous", run_nbytes, buffers.nbytes // run_nbytes, BLOCK_RUNS)
            with suppress(PathError):  # a path that refuses the plan has no figures
                made[direction][path] = _one(compute, executors[path], work(buffers, geometry).plan)
    return made


def _one(compute: Compute, executor: Executor, plan: Plan) -> Beside:
    begin = partial(executor.submit, plan)
    alone = timed({"alone": begin}, seconds=inf, most=TRANSFERS, warm_ups=WARM_UPS)["alone"].wall
    taken = window(compute, begin, warm=WARM, alone=ALONE, transfers=TRANSFERS, seconds=SECONDS)
    rate = alone / statistics.median(taken.transfers)
    return Beside(min(rate, 1.0), max(taken.slowdown, 1.0))
