"""Transfers beside decode, which runs on the GPU of the transfers or on the other one."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.gpu.beside_compute import BesideCompute
from benchmarks.gpu.peer.limits import (
    CHOICE_GBPS,
    CHOICE_MORE,
    FEW_NBYTES,
    FEW_PROGRAMS,
    OVERLAP_GBPS,
    OVERLAP_SLOWDOWN,
    ROUTES,
)
from benchmarks.gpu.peer.rig import Rig
from benchmarks.gpu.required import speed_row
from benchmarks.record import Row
from kvplan.measure.baselines import COPY
from kvplan.measure.compute import DECODE_BATCH, Compute, Window, window

OVERLAP, CHOICE = 'kernel, overlap="decode"', f"kernel, {FEW_PROGRAMS} programs"
WHERE = ("the GPU of the transfers", "the other GPU")
Cases = dict[tuple[int, str, str], BesideCompute]


def beside(rig: Rig) -> Iterator[Row]:
    """Each way beside decode; ways take turns, so that GPUs that drift drift under all."""
    if rig.on_cpu:
        rig.not_run["beside"] = "it needs GPUs"
        return
    measured = _measured(rig)
    for (on, route, name), ours in measured.items():
        copy = measured[on, route, COPY]
        apart = {} if name == COPY else {COPY: copy.gbps}
        what = f"{route} beside decode on {WHERE[on]}, {name}"
        yield speed_row("beside", what, ours.gbps, apart, link=rig.links[route], detail=ours.detail)
        yield Row("beside", f"{what}: compute slower", "x", ours.slowdown, {} if name == COPY else
                  {COPY: copy.slowdown}, detail=ours.detail)  # fmt: skip
    yield from held(measured)


def held(measured: Cases) -> Iterator[Row]:
    """The rows with limits: the fastest way that slows compute no more than it may."""
    for on, where in enumerate(WHERE):
        found = {key: ours for key, ours in measured.items()
                 if key[0] == on and key[2] == OVERLAP and ours.slowdown <= OVERLAP_SLOWDOWN}  # fmt: skip
        yield _fastest(f'overlap="decode", decode on {where}, at x{OVERLAP_SLOWDOWN} or less', found, OVERLAP_GBPS)
    found = {key: ours for key, ours in measured.items()
             if key[0] == 1 and key[2] == CHOICE
             and ours.slowdown <= measured[1, key[1], COPY].slowdown + CHOICE_MORE}  # fmt: skip
    yield _fastest(f"by choice: the idle GPU runs {CHOICE}, at {CHOICE_MORE} above {COPY} or less", found, CHOICE_GBPS)


def _fastest(what: str, found: Cases, limit: float) -> Row:
    best = max(found, key=lambda key: found[key].gbps, default=None)
    if best is None:
        return Row("beside", what, "GB/s", 0.0, {}, limit, f"{limit:g} GB/s", more_is_better=True)
    ours = found[best]
    detail = ours.detail | {"route": best[1], "slowdown": ours.slowdown}
    return Row("beside", what, "GB/s", ours.gbps, {}, limit, f"{limit:g} GB/s", more_is_better=True, detail=detail)


def _measured(rig: Rig) -> Cases:
    """All ways, by the GPU of decode, route and name."""
    scale, gpu = rig.scale, rig.gpus[0]
    sizes = DECODE_BATCH, scale.features, scale.weights, scale.decode_rounds
    computes = [Compute(name, *sizes) for name in rig.gpus[:2]]
    ways = {}
    for route in ROUTES:
        moved = rig.runs(route, FEW_NBYTES)
        ways[route] = {COPY: rig.copy(gpu, rig.gpus[1], route, moved.plan.nbytes),
                       OVERLAP: rig.ours(moved, "kernel", overlap="decode"),
                       CHOICE: rig.ours(moved, "kernel", overlap="decode", max_programs=FEW_PROGRAMS)}  # fmt: skip
    windows: dict[tuple[int, str, str], list[Window]] = {}
    rig.synchronize()
    for _ in range(scale.rounds):
        for on, compute in enumerate(computes):
            for route, some in ways.items():
                for name, way in some.items():
                    way.begin().synchronize()
                    windows.setdefault((on, route, name), []).append(
                        window(compute, way.begin, warm=scale.warm, alone=scale.alone, transfers=scale.transfers,
                               seconds=scale.seconds))  # fmt: skip
    return {key: BesideCompute.of(taken, ways[key[1]][key[2]].nbytes) for key, taken in windows.items()}
