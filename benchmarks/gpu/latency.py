"""CPU time of a submit, and the time of small transfers."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from benchmarks.gpu.alone import COPY
from benchmarks.gpu.required import (
    LATENCY_BLOCKS,
    LATENCY_US,
    SMALL_BLOCKS,
    SMALL_SHARE,
    SUBMIT_KERNEL_US,
    staged_submit_us,
)
from benchmarks.gpu.rig import Rig
from benchmarks.gpu.sizes import spell
from benchmarks.record import Row
from kvplan.errors import PathError
from kvplan.measure.baselines import BATCH, batch_call
from kvplan.measure.rig import no_collection
from kvplan.measure.workload import DIRECTIONS, Work

SMALL_PATHS = ("auto", "staged", "kernel")
WARM_UPS = 3


def works_of(rig: Rig, direction: str, blocks: int, times: int) -> list[Work]:
    """Transfers of as many blocks each, of other ids."""
    return [rig.pages(direction, blocks, seed) for seed in range(1, times + 1)]


def submit(rig: Rig) -> Iterator[Row]:
    """Microseconds of the call of submit, with the GPU idle before; every plan has new ids."""
    for path in ("kernel", "staged"):
        with rig.executor(path) as executor:
            for blocks, repeats in rig.scale.submits:
                for direction in DIRECTIONS:
                    works = works_of(rig, direction, blocks, WARM_UPS + repeats)
                    rig.ours(executor, works[0], path)
                    yield _submit(rig, path, executor, works)


def _submit(rig: Rig, path: str, executor: Any, works: Sequence[Work]) -> Row:
    calls, moves = [], []
    with no_collection():
        for work in works:
            torch.cuda.synchronize()
            start = time.perf_counter()
            transfer = executor.submit(work.plan)
            calls.append(time.perf_counter() - start)
            transfer.synchronize()
            moves.append(transfer.result().seconds)
    calls, moves = sorted(calls[WARM_UPS:]), moves[WARM_UPS:]
    moved = statistics.median(moves)
    direction, count = works[0].plan.direction, works[0].plan.units
    if path == "kernel":
        limit, rule = SUBMIT_KERNEL_US, f"{SUBMIT_KERNEL_US:g} us"
    else:
        limit, rule = staged_submit_us(moved), "100 us + 3 % of the transfer"
    detail = {"most_us": calls[-1] * 1e6, "transfer_us": moved * 1e6, "samples": len(calls)}
    what = f"{path}, {direction}, {count:,} block{'s' * (count > 1)}, {spell(works[0].plan.nbytes)}"
    return Row("submit", what, "us", statistics.median(calls) * 1e6, _batch_call(rig, works[0]), limit, rule,
               detail=detail)  # fmt: skip


def _batch_call(rig: Rig, work: Work) -> dict[str, float]:
    """The same time of the baseline's calls, whose descriptors are ready beforehand."""
    try:
        issue, calls = batch_call(rig.lines[work.geometry.direction], work.plan), []
    except PathError:
        return {}
    for _ in range(WARM_UPS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        issue()
        calls.append(time.perf_counter() - start)
    torch.cuda.synchronize()
    return {BATCH: statistics.median(calls) * 1e6}


def small(rig: Rig) -> Iterator[Row]:
    """Few blocks: time on the GPU from first to last event, and until the host sees it done."""
    for path in SMALL_PATHS:
        with rig.executor(path) as executor:
            for blocks in rig.scale.small:
                for direction in DIRECTIONS:
                    works = works_of(rig, direction, blocks, WARM_UPS + rig.scale.small_repeats)
                    rig.ours(executor, works[0], path)
                    yield from _small(rig, path, executor, works)


def _small(rig: Rig, path: str, executor: Any, works: Sequence[Work]) -> Iterator[Row]:
    """The limits are for ``auto``, which may take any path; the detail names the path."""
    direction, nbytes = works[0].plan.direction, works[0].plan.nbytes
    gpu, seen, taken = [], [], set()
    with no_collection():
        for work in works:
            torch.cuda.synchronize()
            start = time.perf_counter()
            transfer = executor.submit(work.plan)
            while not transfer.done():
                if transfer.queued:
                    time.sleep(0)  # a thread of the executor needs the interpreter; in a sandbox this takes 60 us
            seen.append((time.perf_counter() - start) * 1e6)
            result = transfer.result()
            gpu.append(result.seconds * 1e6)
            taken.add(result.path)
    link = nbytes / rig.ceilings.copy[direction] / 1e3
    beside = {f"bytes / {COPY}": link}
    what, blocks, detail = f"{direction}, {spell(nbytes)}, {path}", works[0].plan.units, {"taken": sorted(taken)}
    held = path == "auto" and blocks == SMALL_BLOCKS
    ours = statistics.median(gpu[WARM_UPS:])
    if ours * 1.03 < link:
        detail["broken"] = "faster than the link"
    yield Row("small", f"{what}: GPU", "us", ours, beside, SMALL_SHARE * link if held else None,
              f"{SMALL_SHARE} x bytes / link" if held else "", detail=detail)  # fmt: skip
    held = path == "auto" and blocks == LATENCY_BLOCKS
    yield Row("small", f"{what}: seen by the host", "us", statistics.median(seen[WARM_UPS:]), beside,
              LATENCY_US if held else None, f"{LATENCY_US:g} us" if held else "", detail=detail)  # fmt: skip
