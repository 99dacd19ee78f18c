"""Whole transfers with nothing else on the GPU: the ceilings, then each path against them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from benchmarks.gpu import twelve_programs as baselines
from benchmarks.gpu.memory import Work
from benchmarks.gpu.required import DIRECTIONS, PITCHED, STAGED, STAGED_BOTH, kernel_share, speed_row
from benchmarks.gpu.rig import WARM_UPS, Bench, Ceilings, Speed
from benchmarks.gpu.sizes import KIB, RUN_NBYTES, spell
from benchmarks.record import Row

COPY, SM = "one large copy", "SM ceiling"
CEILING_PROGRAMS = (8, 16, 32, 64, 132)  # the fastest counts: too many stores stall each other


def one_large_copy(bench: Bench, direction: str) -> Callable[[], Any]:
    """All of the flat buffer by one call of the driver."""
    host, device = bench.buffers(direction)
    src, dst = (host, device) if direction == "load" else (device, host)
    stream = bench.streams[direction].cuda_stream
    return partial(bench.driver.copy, dst.data_ptr(), src.data_ptr(), host.numel(), stream)


def ceilings(bench: Bench) -> Iterator[Row]:
    """What the link does at most in this run; all other groups are held against it."""
    nbytes = bench.scale.large_nbytes
    copy: dict[str, Speed] = {}
    sm: dict[str, Speed] = {}
    for direction in DIRECTIONS:
        copy[direction] = bench.issued(direction, nbytes, one_large_copy(bench, direction))
        yield _ceiling(f"{COPY}, {direction}, {spell(nbytes)}", copy[direction])
    for direction in DIRECTIONS:
        found = {programs: _by_sms(bench, direction, programs) for programs in CEILING_PROGRAMS}
        programs = max(found, key=lambda count: found[count].gbps)
        sm[direction] = found[programs]
        row = _ceiling(f"SMs copy a contiguous buffer, {direction}", sm[direction])
        row.detail.update(programs=programs, by_programs={str(count): speed.gbps for count, speed in found.items()})
        yield row
    calls = [one_large_copy(bench, direction) for direction in DIRECTIONS]

    def both_copies() -> None:
        for call in calls:
            call()
        torch.cuda.synchronize()

    both = Speed(2 * nbytes, *[_median_wall(bench, both_copies)] * 2)
    yield _ceiling("two large copies at once, both directions", both)
    bench.ceilings = Ceilings(*({name: speed.gbps for name, speed in kind.items()} for kind in (copy, sm)), both.gbps)


def _ceiling(what: str, speed: Speed) -> Row:
    return Row("ceilings", what, "GB/s", speed.gbps, detail={"wall_gbps": speed.wall_gbps})


def _by_sms(bench: Bench, direction: str, programs: int) -> Speed:
    from benchmarks.gpu import kernels

    host, device = (raw.view(torch.int64) for raw in bench.buffers(direction))
    src, dst = (host, device) if direction == "load" else (device, host)
    count = src.numel() // kernels.CEILING_WORDS * kernels.CEILING_WORDS

    def issue() -> None:
        with torch.cuda.stream(bench.streams[direction]):
            kernels.contiguous[(programs,)](src, dst, count, WORDS=kernels.CEILING_WORDS,
                                            num_warps=kernels.CEILING_WARPS)  # fmt: skip

    dst.zero_()
    torch.cuda.synchronize()
    issue()
    torch.cuda.synchronize()
    if not torch.equal(src[:count].to(bench.device), dst[:count].to(bench.device)):
        raise RuntimeError(f"{SM}, {direction}: not every byte arrived")
    return bench.issued(direction, count * 8, issue)


def staged(bench: Bench) -> Iterator[Row]:
    """A page-first pool and a cache by layer, by way of a ring in GPU memory."""
    all_baselines = (baselines.BATCH, baselines.PROGRAMS, baselines.INDEXING, baselines.LOOP)
    with bench.executor("staged") as executor:
        for name, count in (("medium", bench.scale.medium), ("large", bench.scale.large)):
            for direction in DIRECTIONS:
                work = bench.pages(direction).work(direction, count)
                ours = bench.proven(executor, work, "staged")
                theirs = all_baselines if name == "medium" else all_baselines[:2]
                beside = {COPY: bench.ceilings.copy[direction]} | baselines.gbps(bench, work, theirs)
                yield _row(bench, "staged", f"{direction}, {spell(work.nbytes)}", ours, beside, direction,
                           STAGED[name, direction])  # fmt: skip
        yield _both(bench, executor)


def _both(bench: Bench, executor: Any) -> Row:
    plans = [bench.pages(direction).work(direction, bench.scale.large).plan for direction in DIRECTIONS]

    def move() -> None:
        for transfer in [executor.submit(plan) for plan in plans]:
            transfer.synchronize()

    nbytes = sum(plan.nbytes for plan in plans)
    ours = nbytes / _median_wall(bench, move) / 1e9
    link = sum(bench.ceilings.copy.values())
    return speed_row("staged", f"both at once, {spell(nbytes // 2)} each", ours,
                     {"two large copies at once": bench.ceilings.both}, link=link, share=STAGED_BOTH)  # fmt: skip


def _median_wall(bench: Bench, call: Callable[[], Any]) -> float:
    """Seconds by the host's clock: events of two streams have no common start."""
    samples = []
    for turn in range(WARM_UPS + bench.scale.repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        end = time.perf_counter()
        if turn >= WARM_UPS:
            samples.append(end - start)
    return statistics.median(samples)


def kernel(bench: Bench) -> Iterator[Row]:
    """Layer-first on both sides, so that host extents are runs: loads by programs, stores by default."""
    scale = bench.scale
    for run_nbytes in scale.kernel_runs:
        for direction in DIRECTIONS:
            work = bench.runs(direction, run_nbytes, scale.medium_nbytes)
            beside = {SM: bench.ceilings.sm[direction], COPY: bench.ceilings.copy[direction]}
            beside |= baselines.gbps(bench, work, (baselines.PROGRAMS,))
            for programs in (*scale.programs, None) if direction == "load" else (None,):
                with bench.executor("kernel", max_programs=programs) as executor:
                    ours = bench.proven(executor, work, f"kernel with {programs} programs")
                share = kernel_share(run_nbytes, programs) if programs else None
                by = f"{programs} programs" if programs else "default"
                yield _row(bench, "kernel", f"{direction}, {spell(run_nbytes)}, {by}", ours, beside, direction, share)


def copy_engine_2d(bench: Bench) -> Iterator[Row]:
    """2-D copies: all runs of a block lie evenly in a cache whose layers share one allocation."""
    with bench.executor("copy_engine_2d") as executor:
        for run_nbytes in bench.scale.pitched_runs:
            for direction in DIRECTIONS:
                work = bench.runs(direction, run_nbytes, bench.scale.medium_nbytes, host="page first")
                ours = bench.proven(executor, work, "copy_engine_2d")
                beside = {COPY: bench.ceilings.copy[direction]} | baselines.gbps(bench, work, (baselines.BATCH,))
                share = PITCHED[direction] if run_nbytes == RUN_NBYTES else None
                row = _row(bench, "copy_engine_2d", f"{direction}, rows of {spell(run_nbytes)}", ours, beside,
                           direction, share)  # fmt: skip
                row.detail["copies"] = len(work.plan.strided())
                yield row


def copy_engine(bench: Bench) -> Iterator[Row]:
    """Single extents by the copy engine, layer-first on both sides."""
    with bench.executor("copy_engine") as executor:
        for run_nbytes in bench.scale.engine_runs:
            for direction in DIRECTIONS:
                # Few large runs would make a short transfer; small ones take their time.
                nbytes = bench.scale.medium_nbytes if run_nbytes <= 64 * KIB else bench.scale.large_nbytes
                work = bench.runs(direction, run_nbytes, nbytes)
                ours = bench.proven(executor, work, "copy_engine")
                names = (baselines.BATCH, baselines.LOOP)
                beside = {COPY: bench.ceilings.copy[direction]} | baselines.gbps(bench, work, names)
                yield _row(bench, "copy_engine", f"{direction}, runs of {spell(run_nbytes)}", ours, beside, direction)


def _row(
    bench: Bench,
    group: str,
    what: str,
    ours: Speed,
    beside: dict[str, float],
    direction: str,
    share: float | None = None,
) -> Row:
    detail = {"nbytes": ours.nbytes, "wall_gbps": ours.wall_gbps}
    return speed_row(group, what, ours.gbps, beside, link=bench.ceilings.copy[direction], share=share, detail=detail)


def all_blocks(bench: Bench, direction: str, nbytes: int) -> Work:
    """The work of the kernel path beside compute: runs of 8 KiB, layer-first on both sides."""
    return bench.runs(direction, RUN_NBYTES, nbytes)
