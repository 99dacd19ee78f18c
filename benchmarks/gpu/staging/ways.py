"""The ways of one step: kvplan's, one contiguous copy of as many bytes, and SGLang's kernels."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

import kvplan
from benchmarks.gpu.rig import Way
from benchmarks.gpu.staging.pools import Halves, settle
from benchmarks.gpu.staging.sglang_files import Launch, Ring, Staging, noted
from kvplan.engines.sglang.ring_plans import Step, plan_of, planes_of
from kvplan.engines.sglang.staging_steps import StagingSteps
from kvplan.measure.flights import AtOnce, Enqueued, Line

OURS, COPY, SGLANG, ROWS = "kvplan", "one contiguous copy", "SGLang's kernel", "SGLang's row kernel"
IN_RING = "kvplan, SGLang's ring"  # the bytes of the ring in SGLang's order
PLANNED, CALL, SERVED = "kvplan, planned from page ids", "SGLang's function", "kvplan as SGLang's function"
GATHER = "_fused_gather_to_staging_kernel"
SCATTER = "_fused_scatter_from_staging_kernel"
MLA_ROWS = "_copy_mla_rows_into_pack_kernel"


class Bench:
    """Where the ways run: one GPU, or the CPU, which shows that the code runs and nothing else."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.line = Line(device) if device != "cpu" else None

    def enqueued(self, nbytes: int, issue: Callable[[], object]) -> Way:
        """A way by calls on torch's current stream, timed by events; on the CPU, by the clock."""
        line = self.line
        if line is None:
            return Way(nbytes, lambda: AtOnce(nbytes, issue))

        def within() -> None:
            with torch.cuda.stream(line.stream):
                issue()

        return Way(nbytes, lambda: Enqueued(line, nbytes, within))


def ours(executor: kvplan.Executor, halves: Halves, step: str) -> dict[str, Way]:
    """The plan that is there; and the whole call, from page ids."""
    plan = halves.plan(step)
    return {
        OURS: Way(plan.nbytes, lambda: executor.submit(plan)),
        PLANNED: Way(plan.nbytes, lambda: executor.submit(halves.plan(step, anew=True))),
    }


def in_ring(executor: kvplan.Executor, steps: StagingSteps, halves: Halves, step: str) -> dict[str, Way]:
    """Kvplan's plan between the pool and SGLang's ring; and the call as SGLang makes it. Every byte is compared."""
    ring, kind, pool = Ring(halves.ring), halves.kind, halves.all
    share = max(kind.heads // kind.sent, 1)
    index = torch.from_numpy(halves.pages).to(halves.device)
    if step == "gather":
        pool.fill(halves.device)
        ring.buffer.zero_()
    else:
        pool.zero()
        ring.buffer.random_(0, 256)
    settle(halves.device)

    def call() -> None:
        if step == "gather":
            steps.gather(pool.k, pool.v, halves.pages, ring, 0, kind.sent, kind.page)
        else:
            steps.scatter(ring.buffer, pool.k, pool.v, index, kind.page, 1, share, 0, kind.heads)
        settle(halves.device)

    layout, planes, _ = planes_of(pool.k, pool.v, kind.page, 0, kind.sent)
    side: Step = "src" if step == "gather" else "dst"
    parts = [one.part(side, halves.pages, halves.ring.data_ptr()) for one in planes]
    plan = plan_of(side, parts, layout, halves.slot.layout)
    executor.submit(plan).synchronize()
    halves.compare_ring(IN_RING)
    if share == 1:  # with slices, SGLang's scatter is told of a pool with some heads: only its kernel takes another
        call()
        halves.compare_ring(SERVED)
    ways = {IN_RING: Way(plan.nbytes, lambda: executor.submit(plan))}
    served = {SERVED: Way(plan.nbytes, lambda: AtOnce(plan.nbytes, call))}
    return ways if step == "scatter" and share > 1 else ways | served


def contiguous(bench: Bench, halves: Halves) -> dict[str, Way]:
    """The ring to other memory of the same device."""
    other = torch.empty_like(halves.ring)
    return {COPY: bench.enqueued(halves.nbytes, lambda: other.copy_(halves.ring))}


def sglang_ways(bench: Bench, halves: Halves, step: str, files: Staging) -> dict[str, Way]:
    """SGLang's functions as they are, and the kernels that they launch alone; every byte is compared first."""
    ring, kind = Ring(halves.ring), halves.kind
    pool, pages = halves.all, np.asarray(halves.pages, dtype=np.int32)
    if step == "gather":
        pool.fill(halves.device)
        call: Callable[[], object] = partial(
            files.buffer.gather_all_layers_to_staging, pool.k, pool.v, pages, ring, 0, kind.sent, kind.page
        )
        found = _both(bench, halves, call, _launch(files.buffer, GATHER, call))
        settle(bench.device)
        halves.compare_ring(CALL)
        return found | _rows(bench, halves, ring, files)
    # One writer with some of the heads: as if the other end had all of them, and this rank a part.
    index = torch.from_numpy(pages.astype(np.int64)).to(halves.device)
    pool.zero()
    halves.ring.random_(0, 256)
    share = max(kind.heads // kind.sent, 1)
    call = partial(files.buffer.scatter_staging_to_kv, halves.ring, pool.k, pool.v, index, kind.page, 1, share, 0,
                   kind.heads)  # fmt: skip
    found = _both(bench, halves, call, _launch(files.buffer, SCATTER, call))
    settle(bench.device)
    halves.compare_ring(CALL)
    return found


def _both(bench: Bench, halves: Halves, call: Callable[[], object], launch: Launch) -> dict[str, Way]:
    def whole() -> None:
        call()
        settle(bench.device)

    return {
        SGLANG: bench.enqueued(halves.nbytes, launch),
        CALL: Way(halves.nbytes, lambda: AtOnce(halves.nbytes, whole)),
    }


def _rows(bench: Bench, halves: Halves, ring: Ring, files: Staging) -> dict[str, Way]:
    """The kernel for latents that are dealt to ranks; it moves whole rows of tokens, one at a time."""
    kind, pool = halves.kind, halves.all
    if kind.page != 1 or kind.sent != kind.heads:
        return {}
    pointers = [tensor.data_ptr() for tensor in (*pool.k, *pool.v)]
    index = torch.from_numpy(halves.pages.astype(np.int64)).to(halves.device)
    halves.ring.zero_()
    call = partial(files.rows.copy_mla_rows_into_pack, pointers, index, ring.buffer, [kind.row] * len(pointers))
    launch = _launch(files.rows, MLA_ROWS, call)
    settle(bench.device)
    halves.compare_ring(ROWS)
    return {ROWS: bench.enqueued(halves.nbytes, launch)}


def _launch(module: Any, kernel: str, call: Callable[[], object]) -> Launch:
    with noted(module, kernel) as launches:
        call()
    return launches[0]
