"""Small transfers: from the call of submit until the end is seen, and CPU time of a submit."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import Any

from benchmarks.gpu.peer.limits import FEW_NBYTES, ROUTES, SEEN_US, SUBMIT_US
from benchmarks.gpu.peer.rig import Rig
from benchmarks.gpu.sizes import spell
from benchmarks.record import Row
from kvplan.measure.baselines import COPY
from kvplan.measure.rig import no_collection
from kvplan.measure.workload import Geometry, Work, between, work

WARM_UPS = 3


def few(rig: Rig) -> Iterator[Row]:
    """One block until the end is seen, and submits of 1 to 1,024 blocks; every plan has new ids."""
    executor = rig.executor(rig.gpus[0])
    for route in ("device", *ROUTES):
        yield _seen(rig, executor, route)
        for blocks, repeats in rig.scale.submits:
            yield _submit(rig, executor, route, blocks, repeats)


def _works(rig: Rig, route: str, blocks: int, times: int) -> list[Work]:
    """Transfers of as many blocks each, of other ids, all between the same two caches; the first is verified."""
    planes, buffers = rig.scale.planes, rig.buffers(route)
    whole = work(buffers, Geometry(route, "scattered", FEW_NBYTES, rig.scale.blocks * planes, planes))
    pool, cache = (whole.dst, whole.src) if route == "push" else (whole.src, whole.dst)
    geometry = Geometry(route, "scattered", FEW_NBYTES, blocks * planes, planes)
    made = [between(pool, cache, geometry, rig.gpus[0], seed) for seed in range(times)]
    executor = rig.executor(rig.gpus[0])
    executor.prepare(made[0].plan)  # as an engine does at its start
    made[0].verify("auto", lambda: executor.submit(made[0].plan).synchronize())
    rig.synchronize()
    return made


def _seen(rig: Rig, executor: Any, route: str) -> Row:
    """Median microseconds from before the submit of one block until ``done()`` is seen to be true."""
    works = _works(rig, route, 1, WARM_UPS + rig.scale.seen)
    seen, gpu, taken = [], [], set()
    with no_collection():
        for one in works:
            start = time.perf_counter()
            transfer = executor.submit(one.plan)
            while not transfer.done():
                if getattr(transfer, "queued", False):
                    time.sleep(0)  # a thread of the executor needs the interpreter
            seen.append((time.perf_counter() - start) * 1e6)
            result = transfer.result()
            gpu.append(result.seconds * 1e6)
            taken.add(result.path)
    detail = {"gpu_us": statistics.median(gpu[WARM_UPS:]), "taken": sorted(taken), "samples": len(seen) - WARM_UPS}
    link = {} if rig.on_cpu else {f"bytes / {COPY}": works[0].plan.nbytes / rig.links[route] / 1e3}
    return Row("few", f"{route}, 1 block, {spell(works[0].plan.nbytes)}: submit to seen", "us",
               statistics.median(seen[WARM_UPS:]), link, SEEN_US, f"{SEEN_US:g} us", detail=detail)  # fmt: skip


def _submit(rig: Rig, executor: Any, route: str, blocks: int, repeats: int) -> Row:
    """Median microseconds of the call of submit, with idle GPUs before it."""
    works = _works(rig, route, blocks, WARM_UPS + repeats)
    calls = []
    with no_collection():
        for one in works:
            rig.synchronize()
            start = time.perf_counter()
            transfer = executor.submit(one.plan)
            calls.append((time.perf_counter() - start) * 1e6)
            transfer.synchronize()
    kept = calls[WARM_UPS:]
    what = f"{route}, {blocks:,} block{'s' * (blocks > 1)}, {spell(works[0].plan.nbytes)}: submit"
    return Row("few", what, "us", statistics.median(kept), {}, SUBMIT_US, f"{SUBMIT_US:g} us",
               detail={"most_us": max(kept), "samples": len(kept)})  # fmt: skip
