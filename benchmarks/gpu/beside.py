"""Transfers beside compute: their speed, and how much slower the compute gets."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from contextlib import ExitStack

from benchmarks.gpu.rig import Rig, Way
from benchmarks.gpu.sizes import RUN_NBYTES, Scale
from benchmarks.record import Row, speed_row
from kvplan.measure.rig import DECODE_BATCH, Compute, Window, window
from kvplan.measure.workload import COPY, DIRECTIONS

FEW_PROGRAMS = 16
OVERLAP, CHOICE = 'kernel, overlap="decode"', f"kernel, {FEW_PROGRAMS} programs"
Ways = Mapping[tuple[str, str], Way]  # by route and name


def decode(scale: Scale, gpu: str) -> Compute:
    """Compute of a decode, in the sizes of the scale."""
    return Compute(gpu, DECODE_BATCH, scale.features, scale.weights, scale.decode_rounds)


def beside(rig: Rig) -> Iterator[Row]:
    """One large copy, two paths and a baseline between the host and a GPU, beside decode and beside prefill."""
    from benchmarks.gpu.alone import one_large_copy
    from benchmarks.gpu.kernels import PROGRAMS, twelve_programs

    scale, gpu = rig.scale, rig.gpus[0]
    computes = {"decode": decode(scale, gpu), "prefill": Compute(gpu, scale.prefill_tokens, scale.features)}
    with ExitStack() as stack:
        executors = {name: stack.enter_context(rig.executor(name, overlap="decode")) for name in ("staged", "kernel")}
        ways = {}
        for route in DIRECTIONS:
            works = {"staged": rig.pages(route, scale.large), "kernel": rig.runs(route, RUN_NBYTES, scale.flat_nbytes)}
            ways[route, COPY] = one_large_copy(rig, route)
            ways |= {(route, name): rig.ours(executors[name], moved, name) for name, moved in works.items()}
            baseline = rig.baselines(works["kernel"], {PROGRAMS: twelve_programs})
            ways |= {(route, name): way for name, way in baseline.items()}
        yield from _rows(rig, computes, ways)


def beside_peer(rig: Rig) -> Iterator[Row]:
    """One large copy and the kernel between two GPUs, beside decode on one of them."""
    if rig.on_cpu:
        rig.not_run["beside"] = "it needs GPUs"
        return
    gpu, peer = rig.gpus[:2]
    where = {"the GPU of the transfers": gpu, "the other GPU": peer}
    computes = {f"decode on {words}": decode(rig.scale, name) for words, name in where.items()}
    ways = {}
    for route in ("push", "pull"):
        moved = rig.runs(route, RUN_NBYTES, rig.scale.nbytes)
        ways[route, COPY] = rig.copy(gpu, peer, route, moved.plan.nbytes)
        for name, knobs in ((OVERLAP, {}), (CHOICE, {"max_programs": FEW_PROGRAMS})):
            executor = rig.kept_executor("kernel", overlap="decode", **knobs)
            ways[route, name] = rig.ours(executor, moved, name)
    yield from _rows(rig, computes, ways)


def _rows(rig: Rig, computes: Mapping[str, Compute], ways: Ways) -> Iterator[Row]:
    """Rows of each way beside each compute; ways take turns, so that a GPU that drifts drifts under all."""
    scale, windows = rig.scale, dict[tuple[str, str, str], list[Window]]()
    rig.synchronize()
    for _ in range(scale.rounds):
        for kind, compute in computes.items():
            for key, way in ways.items():
                way.begin().synchronize()
                windows.setdefault((kind, *key), []).append(
                    window(compute, way.begin, warm=scale.warm, alone=scale.alone, transfers=scale.transfers,
                           seconds=scale.seconds))  # fmt: skip
    rates = {key: ways[key[1:]].nbytes / statistics.median(seconds for one in some for seconds in one.transfers) / 1e9
             for key, some in windows.items()}  # fmt: skip
    slower = {key: statistics.median(one.slowdown for one in some) for key, some in windows.items()}
    for (kind, route, name), some in windows.items():
        ours, what = (kind, route, name), f"{route} beside {kind}, {name}"
        others = {} if name == COPY else {COPY: (kind, route, COPY)}
        detail = {
            "transfers": sum(len(one.transfers) for one in some),
            "mean_slowdown": statistics.median(one.mean_slowdown for one in some),
            "slowdowns": [round(one.slowdown, 3) for one in some],
            "iteration_ms": statistics.median(time for one in some for time in one.alone),
        }
        if any(one.dry for one in some):
            detail["broken"] = "the queue of compute ran empty"
        yield speed_row("beside", what, rates[ours], {words: rates[other] for words, other in others.items()},
                        link=rig.link(route), detail=detail)  # fmt: skip
        yield Row("beside", f"{what}: compute slower", "x", slower[ours],
                  {words: slower[other] for words, other in others.items()}, detail=detail)  # fmt: skip
