"""How fast the host path copies runs of one length, against numpy's memcpy of one large array on as many threads."""

from __future__ import annotations

from math import inf

import kvplan
from benchmarks.numpy_baselines import Memcpy
from benchmarks.problems import Scale, front
from benchmarks.record import Row, speed_row
from kvplan.base.numbers import rounded
from kvplan.measure.rig import AtOnce, timed
from kvplan.measure.workload import Buffers, Geometry, Work, work


def copying(scale: Scale) -> list[Row]:
    """GB/s of blocks in random order, from a cache by layer to a pool by page, by run length and threads."""
    buffers, planes, rows = Buffers(scale.copy_nbytes, "cpu"), scale.layers * 2, []
    for run_nbytes in scale.run_nbytes:
        blocks = max(scale.copy_nbytes // (planes * run_nbytes), 2)
        geometry = Geometry("store", "contiguous", run_nbytes, blocks * planes, planes)
        moved = work(front(buffers, geometry.nbytes), geometry)
        rows += [_copying(scale, buffers, moved, threads) for threads in scale.threads]
    return rows


def _copying(scale: Scale, buffers: Buffers, moved: Work, threads: int) -> Row:
    nbytes, ceiling = moved.plan.nbytes, Memcpy(threads)
    src, dst = (flat[:nbytes].numpy() for flat in (buffers.other, buffers.host))
    with kvplan.Executor("cpu", kvplan.Policy(path="host", threads=threads)) as executor:
        moved.verify("host", lambda: executor.submit(moved.plan).synchronize())
        found = timed(
            {
                "ours": lambda: executor.submit(moved.plan),
                "memcpy": lambda: AtOnce(nbytes, lambda: ceiling.copy(dst, src)),
            },
            seconds=inf,
            most=scale.large,
        )
    ceiling.close()
    speed = {name: nbytes / timing.wall / 1e9 for name, timing in found.items()}
    run_nbytes = moved.geometry.run_nbytes
    what = f"runs of {rounded(run_nbytes)}, {threads} thread{'s' * (threads > 1)}"
    return speed_row("host copy", what, speed["ours"], {"numpy memcpy": speed["memcpy"]},
                     detail={"run_nbytes": run_nbytes, "threads": threads, "nbytes": nbytes})  # fmt: skip
