"""Whole transfers with nothing else on the GPU: the ceilings, then each path against them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.required import PITCHED, STAGED, STAGED_BOTH, kernel_share, speed_row
from benchmarks.gpu.rig import Ceilings, Maker, Rig, Speed, Way
from benchmarks.gpu.sizes import KIB, RUN_NBYTES, spell
from benchmarks.gpu.twelve_programs import NAME as PROGRAMS
from benchmarks.gpu.twelve_programs import twelve_programs
from benchmarks.record import Row
from kvplan.errors import TransferError
from kvplan.measure.baselines import BATCH, INDEXING, LOOP, batch, indexing, large_copy, loop
from kvplan.measure.rig import Begin, Moved
from kvplan.measure.workload import DIRECTIONS

COPY, SM = "one large copy", "SM ceiling"
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
        """See :class:`Flight`."""
        return all(flight.done() for flight in self._flights)

    def synchronize(self) -> None:
        """See :class:`Flight`."""
        for flight in self._flights:
            flight.synchronize()

    def result(self) -> Moved:
        """See :class:`Flight`."""
        results = [flight.result() for flight in self._flights]
        return Moved(sum(one.nbytes for one in results), max(one.seconds for one in results))


def one_large_copy(rig: Rig, direction: str) -> Way:
    """All of the flat buffers by one call of the driver."""
    flat = rig.buffers(direction)
    sides = (flat.host, flat.other) if direction == "load" else (flat.other, flat.host)
    return Way(flat.nbytes, large_copy(rig.lines[direction], *sides))


def ceilings(rig: Rig) -> Iterator[Row]:
    """The most that the link gives in this run; all other groups are compared with it."""
    large = {direction: one_large_copy(rig, direction) for direction in DIRECTIONS}
    copy = rig.speeds(large)
    for direction in DIRECTIONS:
        yield _ceiling(f"{COPY}, {direction}, {spell(rig.scale.large_nbytes)}", copy[direction])
    sm: dict[str, Speed] = {}
    for direction in DIRECTIONS:
        found = rig.speeds({str(programs): _by_sms(rig, direction, programs) for programs in CEILING_PROGRAMS})
        programs = max(found, key=lambda count: found[count].gbps)
        sm[direction] = found[programs]
        row = _ceiling(f"SMs copy a contiguous buffer, {direction}", sm[direction])
        row.detail.update(programs=int(programs), by_programs={count: speed.gbps for count, speed in found.items()})
        yield row
    both = _at_once(rig, [way.begin for way in large.values()], 2 * rig.scale.large_nbytes)
    yield _ceiling("two large copies at once, both directions", both)
    rig.ceilings = Ceilings(*({name: speed.gbps for name, speed in kind.items()} for kind in (copy, sm)), both.gbps)


def _ceiling(what: str, speed: Speed) -> Row:
    return Row("ceilings", what, "GB/s", speed.gbps, detail={"wall_gbps": speed.wall_gbps})


def _at_once(rig: Rig, begins: list[Begin], nbytes: int) -> Speed:
    """Speed of transfers at once, by the host's clock: events of two streams have no common start."""
    found = rig.speeds({"both": Way(nbytes, lambda: Together(*begins))})["both"]
    return found._replace(seconds=found.wall)


def _by_sms(rig: Rig, direction: str, programs: int) -> Way:
    """Copy the flat buffers by a kernel; every byte is seen to arrive first."""
    from benchmarks.gpu import kernels

    flat, line = rig.buffers(direction), rig.lines[direction]
    host, device = (raw.view(torch.int64) for raw in (flat.host, flat.other))
    src, dst = (host, device) if direction == "load" else (device, host)
    count = src.numel() // kernels.CEILING_WORDS * kernels.CEILING_WORDS

    def issue() -> None:
        with torch.cuda.stream(line.stream):
            kernels.contiguous[(programs,)](src, dst, count, WORDS=kernels.CEILING_WORDS,
                                            num_warps=kernels.CEILING_WARPS)  # fmt: skip

    dst.zero_()
    torch.cuda.synchronize()
    issue()
    torch.cuda.synchronize()
    if not torch.equal(src[:count].to(rig.device), dst[:count].to(rig.device)):
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
                if name == "medium":
                    ways |= rig.baselines(moved, {INDEXING: indexing}) | _loop(rig, moved.plan.units, direction)
                yield _row(rig, "staged", f"{direction}, {spell(moved.plan.nbytes)}", rig.speeds(ways), direction,
                           ceilings={COPY: rig.ceilings.copy}, share=STAGED[name, direction])  # fmt: skip
        yield _both(rig, executor)


def _loop(rig: Rig, blocks: int, direction: str) -> dict[str, Way]:
    """A call for each run, of few blocks: many calls would take seconds."""
    few = rig.pages(direction, max(min(blocks, rig.scale.loop_runs // rig.scale.planes), 1))
    return rig.baselines(few, {LOOP: loop})


def _both(rig: Rig, executor: Any) -> Row:
    plans = [rig.pages(direction, rig.scale.large).plan for direction in DIRECTIONS]
    nbytes = sum(plan.nbytes for plan in plans)
    ours = _at_once(rig, [partial(executor.submit, plan) for plan in plans], nbytes)
    link = sum(rig.ceilings.copy.values())
    return speed_row("staged", f"both at once, {spell(nbytes // 2)} each", ours.gbps,
                     {"two large copies at once": rig.ceilings.both}, link=link, share=STAGED_BOTH)  # fmt: skip


def kernel(rig: Rig) -> Iterator[Row]:
    """The kernel path, layer-first on both sides, so that host extents are runs."""
    scale = rig.scale
    for run_nbytes in scale.kernel_runs:
        for direction in DIRECTIONS:
            moved = rig.runs(direction, run_nbytes, scale.medium_nbytes)
            baseline = rig.speeds(rig.baselines(moved, {PROGRAMS: twelve_programs}))
            for programs in (*scale.programs, None) if direction == "load" else (None,):
                with rig.executor("kernel", max_programs=programs) as executor:
                    ours = {"ours": rig.ours(executor, moved, f"kernel with {programs} programs")}
                    found = rig.speeds(ours) | baseline
                share = kernel_share(run_nbytes, programs) if programs else None
                by = f"{programs} programs" if programs else "default"
                yield _row(rig, "kernel", f"{direction}, {spell(run_nbytes)}, {by}", found, direction,
                                ceilings={SM: rig.ceilings.sm, COPY: rig.ceilings.copy}, share=share)  # fmt: skip


def copy_engine_2d(rig: Rig) -> Iterator[Row]:
    """The 2-D path: all runs of a block lie evenly in a cache whose layers share one allocation."""
    with rig.executor("copy_engine_2d") as executor:
        for run_nbytes in rig.scale.pitched_runs:
            for direction in DIRECTIONS:
                moved = rig.runs(direction, run_nbytes, rig.scale.medium_nbytes, host="contiguous")
                ways = {"ours": rig.ours(executor, moved, "copy_engine_2d")} | rig.baselines(moved, {BATCH: batch})
                found = rig.speeds(ways)
                share = PITCHED[direction] if run_nbytes == RUN_NBYTES else None
                row = _row(rig, "copy_engine_2d", f"{direction}, rows of {spell(run_nbytes)}", found, direction,
                           ceilings={COPY: rig.ceilings.copy}, share=share)  # fmt: skip
                row.detail["copies"] = len(moved.plan.strided())
                yield row


def copy_engine(rig: Rig) -> Iterator[Row]:
    """The copy engine path: single extents, layer-first on both sides."""
    with rig.executor("copy_engine") as executor:
        for run_nbytes in rig.scale.engine_runs:
            for direction in DIRECTIONS:
                # Few large runs would make a short transfer; small ones take their time.
                nbytes = rig.scale.medium_nbytes if run_nbytes <= 64 * KIB else rig.scale.large_nbytes
                moved = rig.runs(direction, run_nbytes, nbytes)
                few = rig.runs(direction, run_nbytes, min(nbytes, rig.scale.loop_runs * run_nbytes))
                ways = {"ours": rig.ours(executor, moved, "copy_engine")}
                ways |= rig.baselines(moved, BATCHES) | rig.baselines(few, {LOOP: loop})
                yield _row(rig, "copy_engine", f"{direction}, runs of {spell(run_nbytes)}", rig.speeds(ways), direction,
                           ceilings={COPY: rig.ceilings.copy})  # fmt: skip


def _row(
    rig: Rig,
    group: str,
    what: str,
    found: Mapping[str, Speed],
    direction: str,
    *,
    ceilings: Mapping[str, Mapping[str, float]],
    share: float | None = None,
) -> Row:
    """A row of the way ``"ours"``, with the ceilings and all other ways."""
    ours = found["ours"]
    beside = {name: kind[direction] for name, kind in ceilings.items()}
    beside |= {name: speed.gbps for name, speed in found.items() if name != "ours"}
    detail = {"nbytes": ours.nbytes, "wall_gbps": ours.wall_gbps}
    return speed_row(group, what, ours.gbps, beside, link=rig.ceilings.copy[direction], share=share, detail=detail)
