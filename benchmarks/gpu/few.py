"""CPU time of a submit, and the time of small transfers, over any route; every plan has new ids."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from benchmarks.gpu.rig import Rig
from benchmarks.gpu.sizes import RUN_NBYTES, spell
from benchmarks.record import Row
from kvplan.errors import PathError
from kvplan.measure.rig import no_collection
from kvplan.measure.workload import BATCH, COPY, DIRECTIONS, Geometry, Work, batch_call, between, work

SMALL_PATHS = ("auto", "staged", "kernel")
WARM_UPS = 3


class Samples(NamedTuple):
    """Microseconds of each transfer, without those that warm up.

    Attributes:
        call: of the call of submit.
        seen: from before the call until the host sees the end.
        gpu: from the first to the last event on the GPU.
        taken: the paths that were taken.
    """

    call: list[float]
    seen: list[float]
    gpu: list[float]
    taken: list[str]

    @classmethod
    def measure(cls, rig: Rig, executor: Any, works: Sequence[Work]) -> Samples:
        """Submit works one after another, each with idle GPUs before it."""
        rows = []
        with no_collection():
            for moved in works:
                rig.synchronize()
                start = time.perf_counter()
                transfer = executor.submit(moved.plan)
                called = time.perf_counter()
                while not transfer.done():
                    if getattr(transfer, "queued", False):
                        time.sleep(0)  # a thread of the executor needs the interpreter; in a sandbox this takes 60 us
                ended = time.perf_counter()
                result = transfer.result()
                rows.append((called - start, ended - start, result.seconds, result.path))
        call, seen, gpu, paths = zip(*rows[WARM_UPS:], strict=True)
        micros = ([seconds * 1e6 for seconds in column] for column in (call, seen, gpu))
        return cls(*micros, sorted(set(paths)))

    def submit_row(self, group: str, what: str, beside: dict[str, float]) -> Row:
        """The row of the call of submit."""
        detail = {"most_us": max(self.call), "transfer_us": statistics.median(self.gpu), "samples": len(self.call)}
        return Row(group, what, "us", statistics.median(self.call), beside, detail=detail)

    def seen_row(self, group: str, what: str, beside: dict[str, float]) -> Row:
        """The row until the host sees the end."""
        detail = {"gpu_us": statistics.median(self.gpu), "taken": self.taken, "samples": len(self.seen)}
        return Row(group, what, "us", statistics.median(self.seen), beside, detail=detail)


def _sized(works: Sequence[Work]) -> str:
    plan = works[0].plan
    return f"{plan.units:,} block{'s' * (plan.units > 1)}, {spell(plan.nbytes)}"


def _link(rig: Rig, route: str, works: Sequence[Work]) -> dict[str, float]:
    """Microseconds of the bytes at the rate of one large copy."""
    return {} if rig.on_cpu else {f"bytes / {COPY}": works[0].plan.nbytes / rig.link(route) / 1e3}


def submit(rig: Rig) -> Iterator[Row]:
    """Microseconds of the call of submit, between the host and a GPU."""
    for path in ("kernel", "staged"):
        with rig.executor(path) as executor:
            for blocks, repeats in rig.scale.submits:
                for direction in DIRECTIONS:
                    works = _pages(rig, direction, blocks, repeats)
                    rig.ours(executor, works[0], path)
                    samples = Samples.measure(rig, executor, works)
                    what = f"{path}, {direction}, {_sized(works)}"
                    yield samples.submit_row("submit", what, _batch_call(rig, works[0]))


def _pages(rig: Rig, direction: str, blocks: int, repeats: int) -> list[Work]:
    return [rig.pages(direction, blocks, seed) for seed in range(1, WARM_UPS + repeats + 1)]


def _batch_call(rig: Rig, moved: Work) -> dict[str, float]:
    """The same time of the baseline's calls, whose descriptors are ready beforehand."""
    try:
        issue, calls = batch_call(rig.line(moved.geometry.direction), moved.plan), []
    except PathError:
        return {}
    for _ in range(WARM_UPS):
        rig.synchronize()
        start = time.perf_counter()
        issue()
        calls.append(time.perf_counter() - start)
    rig.synchronize()
    return {BATCH: statistics.median(calls) * 1e6}


def small(rig: Rig) -> Iterator[Row]:
    """Few blocks between the host and a GPU: time on the GPU, and until the host sees the end."""
    for path in SMALL_PATHS:
        with rig.executor(path) as executor:
            for blocks in rig.scale.small:
                for direction in DIRECTIONS:
                    works = _pages(rig, direction, blocks, rig.scale.seen)
                    rig.ours(executor, works[0], path)
                    samples, beside = Samples.measure(rig, executor, works), _link(rig, direction, works)
                    what, ours = f"{direction}, {spell(works[0].plan.nbytes)}, {path}", statistics.median(samples.gpu)
                    (link,) = beside.values()
                    broken = {"broken": "faster than the link"} if ours * 1.03 < link else {}
                    detail = {"taken": samples.taken, **broken}
                    yield Row("small", f"{what}: GPU", "us", ours, beside, detail=detail)
                    yield samples.seen_row("small", f"{what}: seen by the host", beside)


def few(rig: Rig) -> Iterator[Row]:
    """Between GPUs: one block until the end is seen, and submits of 1 to 1,024 blocks."""
    executor = rig.kept_executor("auto")
    for route in ("device", "push", "pull"):
        works = _scattered(rig, executor, route, 1, rig.scale.seen)
        samples = Samples.measure(rig, executor, works)
        yield samples.seen_row("few", f"{route}, {_sized(works)}: submit to seen", _link(rig, route, works))
        for blocks, repeats in rig.scale.submits:
            works = _scattered(rig, executor, route, blocks, repeats)
            samples = Samples.measure(rig, executor, works)
            yield samples.submit_row("few", f"{route}, {_sized(works)}: submit", {})


def _scattered(rig: Rig, executor: Any, route: str, blocks: int, repeats: int) -> list[Work]:
    """Transfers of as many blocks each, all between the same two caches; the first is prepared and verified."""
    planes, buffers = rig.scale.planes, rig.buffers(route)
    whole = work(buffers, Geometry(route, "scattered", RUN_NBYTES, rig.scale.blocks * planes, planes))
    pool, cache = (whole.dst, whole.src) if route == "push" else (whole.src, whole.dst)
    geometry = Geometry(route, "scattered", RUN_NBYTES, blocks * planes, planes)
    works = [between(pool, cache, geometry, rig.gpus[0], seed) for seed in range(WARM_UPS + repeats)]
    executor.prepare(works[0].plan)  # as an engine does at its start
    rig.ours(executor, works[0], "auto")
    return works
