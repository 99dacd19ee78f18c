"""Transfers beside compute: what they reach, and what they cost it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch

from benchmarks.gpu import twelve_programs as baselines
from benchmarks.gpu.alone import COPY, all_blocks, one_large_copy
from benchmarks.gpu.required import (
    DIRECTIONS,
    KERNEL_STORE_SLOWDOWN,
    STAGED_BESIDE,
    STAGED_SLOWER,
    speed_row,
)
from benchmarks.gpu.rig import Bench
from benchmarks.gpu.sizes import spell
from benchmarks.record import Row
from kvplan.measure.compute import DECODE_BATCH, InFlight, Products, Window, window

KINDS = ("decode", "prefill")


class Case(NamedTuple):
    """A way to move one direction's blocks.

    Attributes:
        name: of the path or baseline.
        nbytes: of a transfer.
        begin: starts one.
    """

    name: str
    nbytes: int
    begin: Callable[[], InFlight]


class Enqueued:
    """What a call enqueued on a stream, up to an event of its own."""

    def __init__(self, issue: Callable[[], Any], stream: torch.cuda.Stream) -> None:
        issue()
        self._event = torch.cuda.Event()
        self._event.record(stream)

    def done(self) -> bool:
        """Whether it has finished."""
        return self._event.query()


class Beside(NamedTuple):
    """One case beside one kind of compute, over all its windows."""

    gbps: float
    slowdown: float
    detail: dict[str, Any]

    @classmethod
    def of(cls, windows: Sequence[Window], nbytes: int) -> Beside:
        """Medians over transfers and over windows."""
        taken = [seconds for one in windows for seconds in one.transfers]
        detail = {
            "transfers": len(taken),
            "mean_slowdown": statistics.median(one.mean_slowdown for one in windows),
            "slowdowns": [round(one.slowdown, 3) for one in windows],
            "iteration_ms": statistics.median(time for one in windows for time in one.alone),
        }
        if any(one.dry for one in windows):
            detail["broken"] = "the queue of compute ran empty"
        return cls(nbytes / statistics.median(taken) / 1e9, statistics.median(one.slowdown for one in windows), detail)


def compute_of(bench: Bench, kind: str) -> Products:
    """Decode: a batch of 64 over weights that no cache holds. Prefill: one large product."""
    scale, at = bench.scale, (bench.device, bench.streams["compute"])
    if kind == "decode":
        return Products(*at, rows=DECODE_BATCH, features=scale.features, weights=scale.weights,
                        rounds=scale.decode_rounds)  # fmt: skip
    return Products(*at, rows=scale.prefill_tokens, features=scale.features, weights=1, rounds=1)


def measure(bench: Bench, compute: Products, case: Case) -> Window:
    """One window."""
    scale = bench.scale
    return window(compute, case.begin, warm=scale.warm, alone=scale.alone, transfers=scale.transfers,
                  seconds=scale.seconds)  # fmt: skip


def cases(bench: Bench, direction: str, executors: dict[str, Any]) -> list[Case]:
    """One large copy, two paths and a baseline; each of ours and the baseline was seen to move every byte."""
    nbytes, stream = bench.scale.large_nbytes, bench.streams[direction]
    pages, runs = bench.pages(direction).work(direction, bench.scale.large), all_blocks(bench, direction, nbytes)
    copy, programs = one_large_copy(bench, direction), baselines.twelve_programs(bench, runs)
    found = [Case(COPY, nbytes, lambda: Enqueued(copy, stream))]
    for name, work in (("staged", pages), ("kernel", runs)):
        executor = executors[name]
        work.verify(name, lambda executor=executor, work=work: executor.submit(work.plan).synchronize(), bench.device)
        found.append(Case(name, work.nbytes, lambda executor=executor, plan=work.plan: executor.submit(plan)))
    runs.verify(baselines.PROGRAMS, programs, bench.device)
    return [*found, Case(baselines.PROGRAMS, runs.nbytes, lambda: Enqueued(programs, stream))]


def beside(bench: Bench) -> Iterator[Row]:
    """Each case beside decode and beside prefill; cases take turns, so that a GPU that drifts drifts under all."""
    computes = {kind: compute_of(bench, kind) for kind in KINDS}
    with ExitStack() as stack:
        executors = {name: stack.enter_context(bench.executor(name, overlap="decode")) for name in ("staged", "kernel")}
        found = {direction: cases(bench, direction, executors) for direction in DIRECTIONS}
        windows: dict[tuple[str, str, str], list[Window]] = {}
        for _ in range(bench.scale.rounds):
            for kind, compute in computes.items():
                for direction in DIRECTIONS:
                    for case in found[direction]:
                        taken = windows.setdefault((kind, direction, case.name), [])
                        taken.append(measure(bench, compute, case))
    for kind in KINDS:
        for direction in DIRECTIONS:
            measured = {case.name: Beside.of(windows[kind, direction, case.name], case.nbytes)
                        for case in found[direction]}  # fmt: skip
            yield from _rows(bench, kind, direction, measured)


def _rows(bench: Bench, kind: str, direction: str, measured: dict[str, Beside]) -> Iterator[Row]:
    copy = measured[COPY]
    for name, ours in measured.items():
        staged = name == "staged"
        what, apart = f"{direction} beside {kind}, {name}", {} if name == COPY else {COPY: copy.gbps}
        yield speed_row("beside", what, ours.gbps, apart, link=bench.ceilings.copy[direction],
                        share=STAGED_BESIDE[kind, direction] if staged else None, detail=ours.detail)  # fmt: skip
        limit, rule = None, ""
        if staged:
            limit, rule = copy.slowdown + STAGED_SLOWER[kind], f"{STAGED_SLOWER[kind]} above {COPY}"
        elif (name, kind, direction) == ("kernel", "decode", "store"):
            limit, rule = KERNEL_STORE_SLOWDOWN, f"x{KERNEL_STORE_SLOWDOWN}"
        yield Row("beside", f"{what}: compute slower", "x", ours.slowdown,
                  {} if name == COPY else {COPY: copy.slowdown}, limit, rule, detail=ours.detail)  # fmt: skip


def frontier(bench: Bench) -> Iterator[Row]:
    """The kernel's stores beside decode, by programs and bytes in flight: what throttling buys."""
    scale, compute = bench.scale, compute_of(bench, "decode")
    work = all_blocks(bench, "store", scale.medium_nbytes)
    grid: list[dict[str, int]] = [{}] + [
        {"max_programs": programs, "tile_bytes": tile}
        for programs in scale.frontier_programs
        for tile in scale.frontier_tiles
    ]
    best: tuple[float, str] | None = None
    for knobs in grid:
        with bench.executor("kernel", overlap="decode", **knobs) as executor:
            alone = bench.proven(executor, work, f"kernel with {knobs}")
            case = Case("kernel", work.nbytes, lambda executor=executor: executor.submit(work.plan))
            ours = Beside.of([measure(bench, compute, case) for _ in range(2)], work.nbytes)
        name = f"{knobs['max_programs']} programs x {spell(knobs['tile_bytes'])}" if knobs else "default"
        detail = {**ours.detail, **knobs, "slowdown": ours.slowdown, "nbytes": work.nbytes}
        yield speed_row("frontier", f"store beside decode, {name}", ours.gbps, {"alone": alone.gbps},
                        link=bench.ceilings.copy["store"], rule=f"compute x{ours.slowdown:.3f}",
                        detail=detail)  # fmt: skip
        if knobs and ours.slowdown <= KERNEL_STORE_SLOWDOWN and (best is None or ours.gbps > best[0]):
            best = ours.gbps, name
    if best is not None:
        yield Row("frontier", f"the most at x{KERNEL_STORE_SLOWDOWN} or less: {best[1]}", "GB/s", best[0])
