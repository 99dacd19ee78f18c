"""Measurements of each path beside compute: the time of transfers, and how much slower compute becomes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from functools import partial

from kvplan.cost.model import features
from kvplan.cost.policy import OVERLAPS, Policy
from kvplan.cost.profile import route_paths
from kvplan.cost.statistics import counted
from kvplan.errors import PathError
from kvplan.execute.executor import Executor
from kvplan.measure.calibration.geometries import BESIDE_GRID, ROUNDS
from kvplan.measure.calibration.profile_fit import Sample
from kvplan.measure.compute import compute_of, window
from kvplan.measure.timing import Timing
from kvplan.measure.workload import Buffers, Geometry, work

WARM, ALONE, TRANSFERS, SECONDS = 8, 12, 4, 0.012
WARM_UPS = 2
FEW_COPIES, SMALL = 256, 28 << 10  # the copy engine takes long for more copies of fewer bytes; their cost is known


def measure_beside(buffers: Mapping[str, Buffers], executors: Mapping[str, Executor], until: float) -> Iterator[Sample]:
    """Measure all paths beside each kind of compute, which runs on the GPU of the executors.

    Args:
        buffers: buffers with the bytes to move, by route; at least one.
        executors: executors by path; the kernel's is not used, since its launches depend on the compute.
        until: time of ``time.perf_counter()`` after which no measurement of a path begins.
    """
    device = next(iter(buffers.values())).device
    with ExitStack() as stack:
        computes = {kind: compute_of(device, kind) for kind in OVERLAPS[1:]}
        kernels = {}
        for kind in computes:
            kernels[kind] = stack.enter_context(Executor(device, Policy(path="kernel", overlap=kind)))
        for run_nbytes, runs in BESIDE_GRID:
            for route, whole in buffers.items():
                moved = work(whole, Geometry(route, "contiguous", run_nbytes, runs, ROUNDS[0]))
                counts = counted(moved.plan)
                for path in route_paths(route):
                    if path == "copy_engine" and runs > FEW_COPIES and run_nbytes < SMALL:
                        continue
                    for kind, compute in computes.items():
                        if time.perf_counter() > until:
                            return
                        executor = kernels[kind] if path == "kernel" else executors[path]
                        begin = partial(executor.submit, moved.plan)
                        with suppress(PathError):  # a path that refuses the plan has no figures
                            for _ in range(WARM_UPS):
                                begin().synchronize()
                            taken = window(compute, begin, warm=WARM, alone=ALONE, transfers=TRANSFERS, seconds=SECONDS)
                            timing = Timing(0.0, statistics.median(taken.transfers), 0.0, len(taken.transfers))
                            yield Sample(path, route, moved.plan.nbytes, features(path, counts), timing, kind,
                                         taken.mean_slowdown)  # fmt: skip
