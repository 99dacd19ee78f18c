"""The measurements of ``python -m benchmarks.choice``."""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack
from math import inf

from benchmarks.choice_findings import Point
from benchmarks.choice_pairs import Memory, cases, work
from kvplan.cost.policy import Policy
from kvplan.cost.profile import TERMS, DeviceProfile
from kvplan.execute.executor import Executor
from kvplan.measure.calibrate import measure as measured

SAMPLES, CASE_SECONDS = 41, 0.02
# A path is not measured where the model expects 6 times the time of the best: some paths take a second.
HOPELESS = 6.0


def measure(device: str, profile: DeviceProfile, until: float) -> list[Point]:
    """Measure every path and ``auto`` over the grid; every byte is compared first.

    Args:
        device: ``"cuda:N"``.
        profile: the profile that ``auto`` chooses by.
        until: a time of ``time.perf_counter()``; no point begins after it.
    """
    memory, points = Memory(device), []
    with ExitStack() as stack:
        executors = {path: stack.enter_context(Executor(device, Policy(path=path))) for path in TERMS}
        executors["auto"] = auto = stack.enter_context(Executor(device, Policy(), profile))
        every = list(cases())
        for k, case in enumerate(every):
            if time.perf_counter() > until:
                print(f"the budget is spent: {case} and the {len(every) - k - 1} behind it were not measured",
                      file=sys.stderr)  # fmt: skip
                break
            moved = work(memory, case)
            expected = {one.path: one.wall for one in auto.candidates(moved.plan) if not one.refused}
            able = {path: executor for path, executor in executors.items()
                    if path == "auto" or expected.get(path, inf) <= HOPELESS * min(expected.values())}  # fmt: skip
            samples = measured(moved, able, verify=True, seconds=CASE_SECONDS, most=SAMPLES)
            walls = {one.path: one.timing.wall for one in samples}
            seconds = {one.path: one.timing.seconds for one in samples}
            points.append(Point(case, samples[0].plan, walls, seconds, auto.candidates(moved.plan)[0].path))
    return points
