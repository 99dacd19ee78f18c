"""Whole transfers with nothing else on the GPUs: the ceilings, then within one GPU, and from one to another."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.gpu.peer.limits import BETWEEN, FEW_NBYTES, FEW_PROGRAMS, FEW_SHARE, ROUTES, WITHIN
from benchmarks.gpu.peer.rig import Rig, better
from benchmarks.gpu.rig import Way
from benchmarks.gpu.sizes import spell
from benchmarks.record import Row
from kvplan.errors import PathError
from kvplan.measure.baselines import COPY
from kvplan.measure.workload import Work

ROWS_NBYTES = 8 << 10  # bytes of the shortest runs that are copied as rows: shorter ones would take seconds


def ceilings(rig: Rig) -> Iterator[Row]:
    """One large copy by route: the most that a link, or the memory of a GPU, gives in this run."""
    ways = {route: rig.copy(rig.gpus[0], rig.peer_of(route), route, rig.scale.nbytes) for route in ("device", *ROUTES)}
    found = rig.speeds(ways)
    rig.links = {route: speed.gbps for route, speed in found.items()}
    for route, speed in found.items():
        yield Row("ceilings", f"{COPY}, {route}, {spell(rig.scale.nbytes)}", "GB/s", speed.gbps,
                  detail={"wall_gbps": speed.wall_gbps})  # fmt: skip


def within(rig: Rig) -> Iterator[Row]:
    """Blocks of one cache to another in the same GPU's memory."""
    for run_nbytes in rig.scale.runs:
        yield _row(rig, "within", "device", run_nbytes, WITHIN[run_nbytes])


def between(rig: Rig) -> Iterator[Row]:
    """Blocks of one GPU to another: pushed, pulled, and the better of both."""
    for run_nbytes in rig.scale.runs:
        rows = {route: _row(rig, "between", route, run_nbytes) for route in ROUTES}
        yield from rows.values()
        what = f"the better of push and pull, {spell(run_nbytes)}"
        yield better(rows, what, BETWEEN.get(run_nbytes))
        if run_nbytes == FEW_NBYTES:
            few = {route: _row(rig, "between", route, run_nbytes, programs=FEW_PROGRAMS) for route in ROUTES}
            yield from few.values()
            yield better(few, f"{what}, {FEW_PROGRAMS} programs", FEW_SHARE)


def _rows(rig: Rig, moved: Work) -> dict[str, Way]:
    """The path of 2-D copies, unless it refuses the work."""
    try:
        return {"copy_engine_2d": rig.ours(moved, "copy_engine_2d")}
    except PathError as error:
        rig.not_run[f"copy_engine_2d, {moved.geometry.direction}, {moved.geometry.run_nbytes} B"] = str(error)
        return {}


def _row(rig: Rig, group: str, route: str, run_nbytes: int, share: float | None = None, programs: int = 0) -> Row:
    """A row of the default policy, or of the kernel with so many programs."""
    moved = rig.runs(route, run_nbytes)
    what = f"{route}, {spell(run_nbytes)}"
    if programs:
        ways = {"ours": rig.ours(moved, "kernel", max_programs=programs)} | rig.baselines(moved, COPY)
        what += f", {programs} programs"
    else:
        ways = {"ours": rig.ours(moved, "auto"), "kernel": rig.ours(moved, "kernel")} | rig.baselines(moved)
        if run_nbytes >= ROWS_NBYTES:
            ways |= _rows(rig, moved)
    return rig.row(group, what, rig.speeds(ways), route, share)
