"""Transfers beside compute: their speed, and how much slower the compute gets."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

from benchmarks.gpu.alone import COPY, PROGRAMS, one_large_copy
from benchmarks.gpu.required import KERNEL_STORE_SLOWDOWN, STAGED_BESIDE, STAGED_SLOWER, speed_row
from benchmarks.gpu.rig import Rig, Way
from benchmarks.gpu.sizes import RUN_NBYTES, Scale
from benchmarks.gpu.twelve_programs import twelve_programs
from benchmarks.record import Row
from kvplan.measure.compute import DECODE_BATCH, Compute, Window, window
from kvplan.measure.rig import Flight
from kvplan.measure.workload import DIRECTIONS

KINDS = ("decode", "prefill")


class BesideCompute(NamedTuple):
    """One way beside one kind of compute, over all its windows."""

    gbps: float
    slowdown: float
    detail: dict[str, Any]

    @classmethod
    def of(cls, windows: Sequence[Window], nbytes: int) -> BesideCompute:
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


def products(scale: Scale, kind: str) -> Compute:
    """Compute of a kind, in the sizes of the scale."""
    if kind == "prefill":
        return Compute("cuda:0", scale.prefill_tokens, scale.features)
    return Compute("cuda:0", DECODE_BATCH, scale.features, scale.weights, scale.decode_rounds)


def measure(scale: Scale, compute: Compute, begin: Callable[[], Flight]) -> Window:
    """One window."""
    return window(compute, begin, warm=scale.warm, alone=scale.alone, transfers=scale.transfers, seconds=scale.seconds)


def ways(rig: Rig, direction: str, executors: Mapping[str, Any]) -> dict[str, Way]:
    """One large copy, two paths and a baseline; every byte of the latter three is compared first."""
    works = {"staged": rig.pages(direction, rig.scale.large),
             "kernel": rig.runs(direction, RUN_NBYTES, rig.scale.large_nbytes)}  # fmt: skip
    ours = {name: rig.ours(executors[name], moved, name) for name, moved in works.items()}
    baseline = rig.baselines(works["kernel"], {PROGRAMS: twelve_programs})
    return {COPY: one_large_copy(rig, direction)} | ours | baseline


def beside(rig: Rig) -> Iterator[Row]:
    """Each way beside decode and beside prefill; ways take turns, so that a GPU that drifts drifts under all."""
    computes = {kind: products(rig.scale, kind) for kind in KINDS}
    with ExitStack() as stack:
        executors = {name: stack.enter_context(rig.executor(name, overlap="decode")) for name in ("staged", "kernel")}
        found = {direction: ways(rig, direction, executors) for direction in DIRECTIONS}
        windows: dict[tuple[str, str, str], list[Window]] = {}
        for _ in range(rig.scale.rounds):
            for kind, compute in computes.items():
                for direction in DIRECTIONS:
                    for name, way in found[direction].items():
                        taken = windows.setdefault((kind, direction, name), [])
                        taken.append(measure(rig.scale, compute, way.begin))
    for kind in KINDS:
        for direction in DIRECTIONS:
            measured = {name: BesideCompute.of(windows[kind, direction, name], way.nbytes)
                        for name, way in found[direction].items()}  # fmt: skip
            yield from _rows(rig, kind, direction, measured)


def _rows(rig: Rig, kind: str, direction: str, measured: dict[str, BesideCompute]) -> Iterator[Row]:
    copy = measured[COPY]
    for name, ours in measured.items():
        staged = name == "staged"
        what, apart = f"{direction} beside {kind}, {name}", {} if name == COPY else {COPY: copy.gbps}
        yield speed_row("beside", what, ours.gbps, apart, link=rig.ceilings.copy[direction],
                        share=STAGED_BESIDE[kind, direction] if staged else None, detail=ours.detail)  # fmt: skip
        limit, rule = None, ""
        if staged:
            limit, rule = copy.slowdown + STAGED_SLOWER[kind], f"{STAGED_SLOWER[kind]} above {COPY}"
        elif (name, kind, direction) == ("kernel", "decode", "store"):
            limit, rule = KERNEL_STORE_SLOWDOWN, f"x{KERNEL_STORE_SLOWDOWN}"
        yield Row("beside", f"{what}: compute slower", "x", ours.slowdown,
                  {} if name == COPY else {COPY: copy.slowdown}, limit, rule, detail=ours.detail)  # fmt: skip


def frontier(rig: Rig) -> Iterator[Row]:
    """The kernel's stores beside decode, by programs."""
    scale, compute = rig.scale, products(rig.scale, "decode")
    moved = rig.runs("store", RUN_NBYTES, scale.medium_nbytes)
    grid: list[dict[str, int]] = [{}, *({"max_programs": programs} for programs in scale.frontier_programs)]
    best: tuple[float, str] | None = None
    for knobs in grid:
        with rig.executor("kernel", overlap="decode", **knobs) as executor:
            way = rig.ours(executor, moved, f"kernel with {knobs}")
            alone = rig.speeds({"kernel": way})["kernel"]
            ours = BesideCompute.of([measure(scale, compute, way.begin) for _ in range(2)], way.nbytes)
        name = f"{knobs['max_programs']} programs" if knobs else "default"
        detail = {**ours.detail, **knobs, "slowdown": ours.slowdown, "nbytes": way.nbytes}
        yield speed_row("frontier", f"store beside decode, {name}", ours.gbps, {"alone": alone.gbps},
                        link=rig.ceilings.copy["store"], rule=f"compute x{ours.slowdown:.3f}",
                        detail=detail)  # fmt: skip
        if knobs and ours.slowdown <= KERNEL_STORE_SLOWDOWN and (best is None or ours.gbps > best[0]):
            best = ours.gbps, name
    if best is not None:
        yield Row("frontier", f"the most at x{KERNEL_STORE_SLOWDOWN} or less: {best[1]}", "GB/s", best[0])
