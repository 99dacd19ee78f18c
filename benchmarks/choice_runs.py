"""The measurements of ``python -m benchmarks.choice``, and profiles from samples of an earlier run."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from math import inf
from typing import Any

from benchmarks.choice_findings import Point, plan_of
from benchmarks.choice_pairs import Memory, cases, work
from kvplan.cost.blend import weighed
from kvplan.cost.policy import Policy
from kvplan.cost.profile import TERMS, DeviceProfile
from kvplan.cost.store import shipped
from kvplan.cuda.machine import Link, Machine, machine
from kvplan.execute.executor import Executor
from kvplan.measure.calibrate import calibrate
from kvplan.measure.calibrate import measure as measured
from kvplan.measure.calibration.profile_fit import Sample, ceilings_of, profile_of
from kvplan.measure.timing import Timing

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


def packed(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """Samples for a file: the timings of a plan's paths together, to four digits."""
    made: list[dict[str, Any]] = []
    for one in samples:
        plan = asdict(one.plan)
        if not made or made[-1]["plan"] != plan or one.path in made[-1]["timings"]:
            made.append({"plan": plan, "timings": {}})
        made[-1]["timings"][one.path] = [float(f"{number:.4g}") for number in one.timing]
    return made


def unpacked(rows: Sequence[Mapping[str, Any]]) -> list[Sample]:
    """The same samples again."""
    return [
        Sample(path, plan_of(row["plan"]), Timing(*numbers[:3], int(numbers[3])))
        for row in rows
        for path, numbers in row["timings"].items()
    ]


def refitted(runs: Sequence[Mapping[str, Any]], found: Sequence[DeviceProfile]) -> list[DeviceProfile]:
    """Profiles from the samples that were kept, by the model as it is now."""
    made: list[DeviceProfile] = []
    for run, old in zip(runs, found, strict=True):
        samples = unpacked(run["samples"])
        link = Link(old.generation, old.width, old.generation, old.width)
        here = Machine(old.gpu, old.driver, link, 0, "", None)
        ceilings = ceilings_of(samples, old.ceilings)
        one = profile_of(here, samples, ceilings, old.beside, multiprocessors=old.multiprocessors)
        earlier = made[-1] if made else shipped(here)
        made.append(weighed(one, earlier) if earlier is not None else one)
    return made


def calibrations(device: str, count: int) -> tuple[list[DeviceProfile], list[dict[str, Any]]]:
    """Calibrate several times in a row, as `kvplan calibrate` does; the profiles, and the cost of each."""
    import resource

    import torch

    here = machine()
    profiles: list[DeviceProfile] = []
    runs: list[dict[str, Any]] = []
    torch.cuda.init()
    torch.empty(1, device=device)
    for _ in range(count):
        torch.cuda.empty_cache()
        free = least = torch.cuda.mem_get_info(device)[0]
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

        def look(share: float, what: str) -> None:
            nonlocal least
            del share, what
            least = min(least, torch.cuda.mem_get_info(device)[0])

        start = time.perf_counter()
        samples: list[Sample] = []
        one = calibrate(here, device, look, keep=samples)
        earlier = profiles[-1] if profiles else shipped(here)
        profiles.append(weighed(one, earlier) if earlier is not None else one)
        taken = time.perf_counter() - start
        after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        runs.append(
            {
                "samples": packed(samples),
                "seconds": taken,
                "gpu_mb": (free - least) / 1e6,
                "host_mb": (after - before) / 1e3,
            }
        )
    return profiles, runs
