"""Whole transfers between the host and a GPU, with nothing else on it: the ceilings, then each path against them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

import torch

from benchmarks.gpu.kernels import CEILING_WARPS, CEILING_WORDS, PROGRAMS, contiguous, twelve_programs
from benchmarks.gpu.rig import Maker, Rig, Speed, Way
from benchmarks.gpu.sizes import KIB, spell
from benchmarks.record import Row, speed_row
from kvplan.errors import TransferError
from kvplan.measure.rig import Begin, Line, Moved
from kvplan.measure.workload import (
    BATCH,
    COPY,
    DIRECTIONS,
    INDEXING,
    Baseline,
    Work,
    batch,
    indexing,
    issued,
    large_copy,
)

SM, BOTH, LOOP = "SM ceiling", "two large copies at once", "cuMemcpyAsync a run"
SMALL_BATCH = 256  # the copy engine begins when a call returns, so calls of fewer copies may be faster
BATCHES: Mapping[str, Maker] = {BATCH: batch, f"{BATCH}, {SMALL_BATCH} a call": partial(batch, most=SMALL_BATCH)}
CEILING_PROGRAMS = (8, 16, 32, 64, 132)  # the fastest counts: too many stores stall each other


class Together:
    """Several transfers, started one after another, as one; it ends when all of them have ended.

    Their events have no common start, so ``seconds`` of the result is the time of the longest transfer.
    """

    def __init__(self, *begins: Begin) -> None:
        self._flights = [begin() for begin in begins]

    @property
    def queued(self) -> bool:
        """Return whether a thread of an executor must still issue one of them."""
        return any(getattr(flight, "queued", False) for flight in self._flights)

    def done(self) -> bool:
        """See :mod:`kvplan.measure.rig`."""
        return all(flight.done() for flight in self._flights)

    def synchronize(self) -> None:
        """See :mod:`kvplan.measure.rig`."""
        for flight in self._flights:
            flight.synchronize()

    def result(self) -> Moved:
        """See :mod:`kvplan.measure.rig`."""
        results = [flight.result() for flight in self._flights]
        return Moved(sum(result.nbytes for result in results), max(result.seconds for result in results))


def loop(line: Line, work: Work) -> Baseline:
    """One cuMemcpyAsync call per run."""
    src, dst, size = (column.tolist() for column in work.plan.descriptors())
    moves = list(zip(dst, src, size, strict=True))

    def issue() -> None:
        for move in moves:
            line.device.copy(*move, line.handle)

    return issued(LOOP, line, work, issue)


def one_large_copy(rig: Rig, direction: str) -> Way:
    """All of the flat buffers by one call of the driver."""
    flat = rig.buffers(direction)
    sides = (flat.host, flat.other) if direction == "load" else (flat.other, flat.host)
    return Way(flat.nbytes, large_copy(rig.line(direction), *sides))


def ceilings(rig: Rig) -> Iterator[Row]:
    """The most that the link gives in this run; all other groups are compared with it."""
    large = {direction: one_large_copy(rig, direction) for direction in DIRECTIONS}
    copy = rig.speeds(large)
    for direction in DIRECTIONS:
        yield _ceiling(f"{COPY}, {direction}, {spell(rig.scale.flat_nbytes)}", copy[direction])
    sm: dict[str, Speed] = {}
    for direction in DIRECTIONS:
        counts = rig.speeds({str(programs): _by_sms(rig, direction, programs) for programs in CEILING_PROGRAMS})
        programs = max(counts, key=lambda count: counts[count].gbps)
        sm[direction] = counts[programs]
        by_programs = {count: speed.gbps for count, speed in counts.items()}
        yield _ceiling(f"SMs copy a contiguous buffer, {direction}", sm[direction],
                       programs=int(programs), by_programs=by_programs)  # fmt: skip
    both = _at_once(rig, [way.begin for way in large.values()], 2 * rig.scale.flat_nbytes)
    yield _ceiling("two large copies at once, both directions", both)
    rig.ceilings = {name: {route: speed.gbps for route, speed in kind.items()} for name, kind in
                    ((COPY, copy), (SM, sm), (BOTH, {"both": both}))}  # fmt: skip


def _ceiling(what: str, speed: Speed, **detail: object) -> Row:
    return speed_row("ceilings", what, speed.gbps, {}, detail={"wall_gbps": speed.wall_gbps, **detail})


def _at_once(rig: Rig, begins: list[Begin], nbytes: int) -> Speed:
    """Speed of transfers at once, by the host's clock: events of two streams have no common start."""
    speed = rig.speeds({"both": Way(nbytes, lambda: Together(*begins))})["both"]
    return speed._replace(seconds=speed.wall)


def _by_sms(rig: Rig, direction: str, programs: int) -> Way:
    """Copy the flat buffers by a kernel; every byte is seen to arrive first."""
    flat, line = rig.buffers(direction), rig.line(direction)
    host, device = (raw.view(torch.int64) for raw in (flat.host, flat.other))
    src, dst = (host, device) if direction == "load" else (device, host)
    count = src.numel() // CEILING_WORDS * CEILING_WORDS

    def issue() -> None:
        with torch.cuda.stream(line.stream):
            contiguous[(programs,)](src, dst, count, WORDS=CEILING_WORDS, num_warps=CEILING_WARPS)

    dst.zero_()
    torch.cuda.synchronize()
    issue()
    torch.cuda.synchronize()
    if not torch.equal(src[:count].to(rig.gpus[0]), dst[:count].to(rig.gpus[0])):
        raise TransferError(f"{SM}, {direction}: not every byte arrived")
    return Way(count * 8, lambda: line.start(count * 8, issue))


def staged(rig: Rig) -> Iterator[Row]:
    """The staged path: a page-first pool and a cache by layer, through a ring in GPU memory."""
    with rig.executor("staged") as executor:
        for name, count in (("medium", rig.scale.medium), ("large", rig.scale.large)):
            for direction in DIRECTIONS:
                moved = rig.pages(direction, count)
                ways = {"ours": rig.ours(executor, moved, "staged")}
                ways |= rig.baselines(moved, {**BATCHES, PROGRAMS: twelve_programs})
                if name == "medium":  # a call for each run of few blocks: many calls would take seconds
                    few = rig.pages(direction, max(min(count, rig.scale.loop_runs // rig.scale.planes), 1))
                    ways |= rig.baselines(moved, {INDEXING: indexing}) | rig.baselines(few, {LOOP: loop})
                what = f"{direction}, {spell(moved.plan.nbytes)}"
                yield rig.row("staged", what, rig.speeds(ways), direction, [COPY])
        plans = [rig.pages(direction, rig.scale.large).plan for direction in DIRECTIONS]
        nbytes = sum(plan.nbytes for plan in plans)
        both = _at_once(rig, [partial(executor.submit, plan) for plan in plans], nbytes)
        yield speed_row("staged", f"both at once, {spell(nbytes // 2)} each", both.gbps,
                        {BOTH: rig.ceilings[BOTH]["both"]}, link=sum(rig.ceilings[COPY].values()))  # fmt: skip


def kernel(rig: Rig) -> Iterator[Row]:
    """The kernel path, layer-first on both sides, so that host extents are runs."""
    scale = rig.scale
    for run_nbytes in scale.kernel_runs:
        for direction in DIRECTIONS:
            moved = rig.runs(direction, run_nbytes, scale.medium_nbytes)
            baseline = rig.speeds(rig.baselines(moved, {PROGRAMS: twelve_programs}))
            for programs in (*scale.programs, None) if direction == "load" else (None,):
                with rig.executor("kernel", max_programs=programs) as executor:
                    ours = rig.speeds({"ours": rig.ours(executor, moved, f"kernel with {programs} programs")})
                by = f"{programs} programs" if programs else "default"
                what = f"{direction}, {spell(run_nbytes)}, {by}"
                yield rig.row("kernel", what, ours | baseline, direction, [SM, COPY])


def copy_engine_2d(rig: Rig) -> Iterator[Row]:
    """The 2-D path: all runs of a block lie evenly in a cache whose layers share one allocation."""
    with rig.executor("copy_engine_2d") as executor:
        for run_nbytes in rig.scale.pitched_runs:
            for direction in DIRECTIONS:
                moved = rig.runs(direction, run_nbytes, rig.scale.medium_nbytes, host="contiguous")
                ways = {"ours": rig.ours(executor, moved, "copy_engine_2d")} | rig.baselines(moved, {BATCH: batch})
                what = f"{direction}, rows of {spell(run_nbytes)}"
                yield rig.row("copy_engine_2d", what, rig.speeds(ways), direction, [COPY])


def copy_engine(rig: Rig) -> Iterator[Row]:
    """The copy engine path: single extents, layer-first on both sides."""
    with rig.executor("copy_engine") as executor:
        for run_nbytes in rig.scale.engine_runs:
            for direction in DIRECTIONS:
                # Few large runs would make a short transfer; small ones take their time.
                nbytes = rig.scale.medium_nbytes if run_nbytes <= 64 * KIB else rig.scale.flat_nbytes
                moved = rig.runs(direction, run_nbytes, nbytes)
                few = rig.runs(direction, run_nbytes, min(nbytes, rig.scale.loop_runs * run_nbytes))
                ways = {"ours": rig.ours(executor, moved, "copy_engine")}
                ways |= rig.baselines(moved, BATCHES) | rig.baselines(few, {LOOP: loop})
                what = f"{direction}, runs of {spell(run_nbytes)}"
                yield rig.row("copy_engine", what, rig.speeds(ways), direction, [COPY])
