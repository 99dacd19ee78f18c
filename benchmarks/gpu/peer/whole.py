"""Whole transfers with nothing else on the GPUs: the ceilings, then within one GPU, and from one to another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from benchmarks.gpu.beside import FEW_PROGRAMS
from benchmarks.gpu.rig import Maker, Rig, Way
from benchmarks.gpu.sizes import KIB, RUN_NBYTES, spell
from benchmarks.record import Row, speed_row
from kvplan.errors import PathError
from kvplan.measure.workload import BATCH, COPY, INDEXING, batch, indexing, one_piece

ROUTES = ("push", "pull")
ROWS_NBYTES = 8 * KIB  # bytes of the shortest runs that are copied as rows: shorter ones would take seconds


def ceilings(rig: Rig) -> Iterator[Row]:
    """One large copy by route: the most that a link, or the memory of a GPU, gives in this run."""
    gpu, nbytes = rig.gpus[0], rig.scale.nbytes
    peers = {"device": gpu, **dict.fromkeys(ROUTES, rig.gpus[1])}
    speeds = rig.speeds({route: rig.copy(gpu, peer, route, nbytes) for route, peer in peers.items()})
    rig.ceilings = {COPY: {route: speed.gbps for route, speed in speeds.items()}}
    for route, speed in speeds.items():
        yield speed_row("ceilings", f"{COPY}, {route}, {spell(nbytes)}", speed.gbps, {},
                        detail={"wall_gbps": speed.wall_gbps})  # fmt: skip


def within(rig: Rig) -> Iterator[Row]:
    """Blocks of one cache to another in the same GPU's memory."""
    for run_nbytes in rig.scale.runs:
        yield _row(rig, "within", "device", run_nbytes)


def between(rig: Rig) -> Iterator[Row]:
    """Blocks of one GPU to another: pushed, pulled, and the better of both."""
    for run_nbytes in rig.scale.runs:
        for programs in (0, FEW_PROGRAMS) if run_nbytes == RUN_NBYTES else (0,):
            rows = {route: _row(rig, "between", route, run_nbytes, programs) for route in ROUTES}
            yield from rows.values()
            yield better(rows, f"the better of push and pull, {spell(run_nbytes)}{_by(programs)}")


def better(rows: Mapping[str, Row], what: str) -> Row:
    """The row of the route that comes closer to one large copy, with this copy alone beside it."""
    route = max(rows, key=lambda name: rows[name].ratios.get(COPY, 0.0))
    row = rows[route]
    return Row(row.group, what, row.unit, row.ours, {COPY: row.beside[COPY]}, more_is_better=True,
               detail={**row.detail, "route": route})  # fmt: skip


def _by(programs: int) -> str:
    return f", {programs} programs" if programs else ""


def _row(rig: Rig, group: str, route: str, run_nbytes: int, programs: int = 0) -> Row:
    """A row of the default policy, or of the kernel with so many programs."""
    moved = rig.runs(route, run_nbytes, rig.scale.nbytes)
    copy: dict[str, Maker] = {COPY: one_piece}
    others: dict[str, Maker] = {INDEXING: indexing} if rig.on_cpu else {BATCH: batch, INDEXING: indexing}
    if programs:
        executor = rig.kept_executor("kernel", max_programs=programs)
        ways = {"ours": rig.ours(executor, moved, "kernel")} | rig.baselines(moved, copy)
    else:
        paths = {"ours": "auto", "kernel": "kernel"}
        ways = {name: rig.ours(rig.kept_executor(path), moved, path) for name, path in paths.items()}
        ways |= rig.baselines(moved, copy | others)
        if run_nbytes >= ROWS_NBYTES:
            ways |= _rows_by_copy_engine(rig, moved)
    return rig.row(group, f"{route}, {spell(run_nbytes)}{_by(programs)}", rig.speeds(ways), route)


def _rows_by_copy_engine(rig: Rig, moved) -> dict[str, Way]:
    """The path of 2-D copies, unless it refuses the work."""
    name = "copy_engine_2d"
    try:
        return {name: rig.ours(rig.kept_executor(name), moved, name)}
    except PathError as error:
        rig.refused(name, moved, error)
        return {}
