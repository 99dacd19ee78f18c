"""``python -m benchmarks.choice``: does ``auto`` take the best path, alone and beside compute?

Measures every path over pairs of layouts, run lengths, numbers of blocks and both directions: with nothing else on the
GPU, beside decode, and beside prefill. What counts is a transfer's time, plus what compute loses in it.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.choice_pairs import KIB, MOST_NBYTES, PAIRS, Case, Memory, work
from kvplan.cost.model import features
from kvplan.cost.policy import OVERLAPS, Policy
from kvplan.cost.profile import TERMS
from kvplan.cost.statistics import counted
from kvplan.execute.executor import Executor
from kvplan.measure.compute import KINDS, Compute, window
from kvplan.measure.rig import timed
from kvplan.measure.workload import DIRECTIONS

NEAR = 1.05  # times the best path
HOPELESS = 6.0  # a path is not measured where the model expects so many times the time of the best
RUN_NBYTES, BLOCKS = (512, 2 * KIB, 8 * KIB, 32 * KIB, 64 * KIB, 256 * KIB), (4, 64, 1024)
Point = dict[str, Any]


def points(device: str, until: float) -> Iterator[Point]:
    """Measure the grid in random order; no transfer begins after a time of ``time.perf_counter()``."""
    memory = Memory(device)
    grid = [Case(pair, way, run, blocks) for pair in PAIRS for run in RUN_NBYTES for blocks in BLOCKS
            for way in DIRECTIONS]  # fmt: skip
    random.Random(7).shuffle(grid)  # noqa: S311  # not secret
    with ExitStack() as stack:
        executors = {(kind, path): stack.enter_context(Executor(device, Policy(path=path, overlap=kind)))
                     for kind in OVERLAPS for path in (*TERMS, "auto")}  # fmt: skip
        computes = {kind: Compute(device, *KINDS[kind]) for kind in OVERLAPS[1:]}
        for case in [case for case in grid if case.nbytes <= MOST_NBYTES]:
            if time.perf_counter() > until:
                print("the time is spent", file=sys.stderr)
                return
            moved = work(memory, case)
            for kind in OVERLAPS:
                found = [one for one in executors[kind, "auto"].candidates(moved.plan) if not one.refused]
                least, walls, slower = min(one.wall for one in found), {}, {}
                for path in [one.path for one in found if one.wall <= HOPELESS * least]:
                    walls[path], slower[path] = _time(executors[kind, path], moved.plan, computes.get(kind))
                yield {
                    "case": case._asdict(), "overlap": kind, "taken": found[0].path, "walls": walls, "slower": slower,
                    "terms": {path: features(path, counted(moved.plan))[1:] for path in TERMS},
                    "scores": {path: wall * (2 - 1 / slower[path]) for path, wall in walls.items()},
                }  # fmt: skip


def _time(executor: Executor, plan: Any, compute: Compute | None) -> tuple[float, float]:
    """Return the seconds of a transfer, and how much slower compute is meanwhile."""
    for _ in range(2):
        executor.submit(plan).synchronize()

    def begin() -> Any:
        return executor.submit(plan)

    if compute is None:
        return timed({"": begin}, seconds=0.02)[""].wall, 1.0
    taken = window(compute, begin, warm=4, alone=12, transfers=4, seconds=0.012)
    return statistics.median(taken.transfers), max(taken.mean_slowdown, 1.0)


def show(found: Sequence[Point]) -> None:
    """Print how often a choice is within 5 % of the best path, and its worst ratio."""
    for kind in OVERLAPS:
        some = [point for point in found if point["overlap"] == kind]
        for name in ("auto", *TERMS):
            ratios = [point["scores"].get(point["taken"] if name == "auto" else name, math.inf) /
                      min(point["scores"].values()) for point in some]  # fmt: skip
            if ratios:
                near = sum(ratio <= NEAR for ratio in ratios) / len(ratios)
                print(f"{kind:8} {name:22} {len(ratios):4} {near:7.1%} within 5 %, at worst {max(ratios):.2f}x")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.choice", description=__doc__)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--budget", type=float, default=math.inf, metavar="SECONDS")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    chosen = parser.parse_args(arguments)
    found = list(points(chosen.device, time.perf_counter() + chosen.budget))
    if chosen.output:
        chosen.output.write_text(json.dumps({"schema": "kvplan.choice", "version": 4, "points": found}))
    show(found)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
