"""Rows of gather and scatter: each speed of kvplan, with the limits that it must keep."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from math import inf

import kvplan
from benchmarks.gpu.rig import Speed, Way
from benchmarks.gpu.sizes import spell
from benchmarks.gpu.staging.pools import Halves, Kind, Scale, settle
from benchmarks.gpu.staging.sglang_files import Staging
from benchmarks.gpu.staging.ways import (
    CALL,
    COPY,
    IN_RING,
    OURS,
    PLANNED,
    ROWS,
    SERVED,
    SGLANG,
    Bench,
    contiguous,
    in_ring,
    ours,
    sglang_ways,
)
from benchmarks.record import Row
from kvplan.engines.sglang.staging_steps import StagingSteps
from kvplan.measure.timing import timed

STEPS = ("gather", "scatter")
OF_COPY, OF_SGLANG = 0.85, 1.2  # least share of a copy, and times SGLang's kernel
WARM_UPS = 3


def measure(bench: Bench, kind: Kind, nbytes: int, scale: Scale, files: Staging | None) -> Iterator[Row]:
    """Both steps of one kind of rows.

    Args:
        bench: where they run.
        kind: the rows.
        nbytes: bytes of a transfer, about.
        scale: layers, samples and path.
        files: SGLang's, if they could be loaded.
    """
    halves = Halves(kind, nbytes, bench.device, scale.layers)
    policy = kvplan.Policy() if bench.line is None else kvplan.Policy(path=scale.path)
    with kvplan.Executor(bench.device, policy) as executor, closing(StagingSteps(policy)) as steps:
        halves.verify(executor)
        for step in STEPS:
            theirs = {} if files is None else sglang_ways(bench, halves, step, files)
            ways = ours(executor, halves, step) | contiguous(bench, halves) | theirs
            ways |= in_ring(executor, steps, halves, step)
            found = speeds(bench, ways, scale.repeats)
            moved = executor.submit(halves.plan(step)).result()
            detail: dict[str, object] = {
                "nbytes": halves.nbytes,
                "path": moved.path,
                "launches": moved.launches,
                "copies": (halves.gathering.src if step == "gather" else halves.scattering.dst).facts.copies,
            }
            yield from rows_of(f"{step}, about {spell(nbytes)}", kind.told, found, detail)


def speeds(bench: Bench, ways: dict[str, Way], repeats: int) -> dict[str, Speed]:
    """Speed of each way, measured in turns."""
    settle(bench.device)
    timings = timed({name: way.begin for name, way in ways.items()}, seconds=inf, most=repeats, warm_ups=WARM_UPS)
    return {name: Speed(ways[name].nbytes, one.seconds, one.wall) for name, one in timings.items()}


def rows_of(group: str, what: str, found: dict[str, Speed], detail: dict[str, object]) -> Iterator[Row]:
    """The rows of one step: against the copy, against SGLang's kernels, and the calls from page ids."""
    gbps = {name: speed.gbps for name, speed in found.items()}
    ours = gbps[OURS]
    yield Row(group, what, "GB/s", ours, {COPY: gbps[COPY]}, OF_COPY * gbps[COPY], f"{OF_COPY:g} x {COPY}",
              more_is_better=True, detail=detail)  # fmt: skip
    ring = gbps[IN_RING]
    yield Row(group, f"{what}, SGLang's ring", "GB/s", ring, {COPY: gbps[COPY]}, OF_COPY * gbps[COPY],
              f"{OF_COPY:g} x {COPY}", more_is_better=True, detail=detail)  # fmt: skip
    kernels = {name: gbps[name] for name in (SGLANG, ROWS) if name in gbps}
    if kernels:
        most = max(kernels.values())
        for name, mine in ((what, ours), (f"{what}, SGLang's ring", ring)):
            yield Row(group, f"{name}, times SGLang", "GB/s", mine, kernels, OF_SGLANG * most,
                      f"{OF_SGLANG:g} x SGLang's faster kernel", more_is_better=True, detail=detail)  # fmt: skip
    calls = {name: found[name].wall * 1e3 for name in (SERVED, CALL) if name in found}
    yield Row(group, f"{what}, call and wait", "ms", found[OURS].wall * 1e3,
              {"a contiguous copy": found[COPY].wall * 1e3, PLANNED: found[PLANNED].wall * 1e3} | calls)  # fmt: skip
