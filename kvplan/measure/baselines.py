"""Baselines: other ways to move the blocks of a work. Each has a name and a call that starts one transfer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from kvplan.cuda.rows import copy_rows
from kvplan.errors import HostMemoryError, PathError, TransferError
from kvplan.measure.flights import AtOnce, Begin, Enqueued, Line
from kvplan.measure.rows import Ceilings, Missing, Row, figures
from kvplan.measure.timing import timed
from kvplan.measure.workload import Side, Work
from kvplan.plan.plan import Plan

BATCH = "cuMemcpyBatchAsync"
LOOP = "cuMemcpyAsync a run"
INDEXING = "torch indexing"
MEMCPY = "numpy memcpy"
COPY, NCCL = "one large copy", "NCCL send/recv"  # between GPUs: kvplan/measure/peers/peer_baselines.py
MOST_DESCRIPTORS = 16_384  # per call; batches with far more have crashed drivers
MOST_CALLS = 8192  # calls of the loop: more would take seconds


class Baseline(NamedTuple):
    """A baseline for one work.

    Attributes:
        begin: function that starts a transfer.
        verify: function that moves the work and raises TransferError if a byte did not arrive.
        expect: function that returns the seconds that the cost model predicts, or None.
    """

    begin: Begin
    verify: Callable[[], None]
    expect: Callable[[], float | None] = lambda: None


Maker = Callable[[Work], Baseline]


def proven(make: Callable[[], Baseline], row: Row, name: str, missing: list[Missing]) -> Baseline | Row | None:
    """Return a way to move a work that is verified; a broken row if bytes did not arrive; None if it refuses the work.

    Args:
        make: function that makes it.
        row: its row, without figures.
        name: name of the work, with which a refusal is listed.
        missing: the list.
    """
    try:
        made = make()
        made.verify()
    except (PathError, HostMemoryError) as error:
        missing.append(Missing(f"{row.label}: {name}", one_line(error)))
        return None
    except RuntimeError as error:  # TransferError, or torch's: no memory
        return replace(row, verified=False, broken=one_line(error))
    return made


def timed_rows(
    cases: Mapping[str, tuple[Row, Begin]], found: Ceilings, *, seconds: float, most: int, warm_ups: int
) -> list[Row]:
    """Time ways to move one work, alternating between them; see :func:`kvplan.measure.timing.timed`."""
    begun = {name: begin for name, (_, begin) in cases.items()}
    try:
        timings = timed(begun, seconds=seconds, most=most, warm_ups=warm_ups)
    except RuntimeError as error:  # one failed: the times of those that alternated with it mean nothing
        return [replace(row, broken=one_line(error), predicted=None) for row, _ in cases.values()]
    return [replace(row, **timings[name]._asdict(), **figures(row.nbytes, timings[name].seconds, found, row.direction))
            for name, (row, _) in cases.items()]  # fmt: skip


def one_line(error: Exception) -> str:
    """Return an error's text in one line."""
    return " ".join(str(error).split()) or type(error).__name__


def makers(device: str) -> Mapping[str, Maker]:
    """Return, by name, the functions that make a baseline for a work; they raise PathError if it cannot move the work.

    Args:
        device: ``"cpu"``; or ``"cuda:N"``, which needs torch with CUDA.

    >>> sorted(makers("cpu"))
    ['numpy memcpy', 'torch indexing']
    """
    if device == "cpu":
        return {MEMCPY: _memcpy, INDEXING: _indexing_on_cpu}
    line = Line(device)
    return {BATCH: partial(batch, line), LOOP: partial(loop, line), INDEXING: partial(indexing, line)}


def names(device: str, peer: str | None = None) -> tuple[str, ...]:
    """Return the names of the baselines of a device, or of a GPU and its peer, without opening the device.

    >>> names("cuda:0")
    ('cuMemcpyBatchAsync', 'cuMemcpyAsync a run', 'torch indexing')
    >>> names("cuda:0", "cuda:1")
    ('one large copy', 'cuMemcpyBatchAsync', 'NCCL send/recv', 'torch indexing')
    """
    if peer is not None:
        return (COPY, BATCH, INDEXING) if peer == device else (COPY, BATCH, NCCL, INDEXING)
    return (MEMCPY, INDEXING) if device == "cpu" else (BATCH, LOOP, INDEXING)


def verified(name: str, work: Work, begin: Begin) -> Baseline:
    """Return a baseline that :meth:`kvplan.measure.workload.Work.verify` checks."""
    return Baseline(begin, lambda: work.verify(name, lambda: begin().synchronize()))


def batch(line: Line, work: Work, most: int | None = None) -> Baseline:
    """Make the baseline of the driver's batch call, with one descriptor per run; see :func:`batch_call`."""
    issue = batch_call(line, work.plan, most)
    return verified(BATCH, work, lambda: Enqueued(line, work.plan.nbytes, issue))


def batch_call(line: Line, plan: Plan, most: int | None = None) -> Callable[[], None]:
    """Return a function that calls cuMemcpyBatchAsync for a plan; the descriptors are made here, before it is timed.

    Args:
        line: stream of the calls.
        plan: the copies.
        most: most descriptors per call; None for as many as no driver has crashed at.

    Raises:
        PathError: the driver has no cuMemcpyBatchAsync.
    """
    device = line.device
    if device.driver.cuMemcpyBatchAsync is None:
        raise PathError("the driver has no cuMemcpyBatchAsync: it came with 570")
    columns = np.stack(plan.descriptors())
    rows = copy_rows(columns, line.handle, least=0, most=most or MOST_DESCRIPTORS)

    def issue(_kept: object = columns) -> None:  # the rows name them by address
        device.issue(rows)

    return issue


def loop(line: Line, work: Work) -> Baseline:
    """Make the baseline of one cuMemcpyAsync call per run."""
    if work.geometry.runs > MOST_CALLS:
        raise PathError(f"it makes a call for each run, and {work.geometry.runs:,} runs are more than {MOST_CALLS:,}")
    src, dst, size = (column.tolist() for column in work.plan.descriptors())
    moves = list(zip(dst, src, size, strict=True))

    def issue() -> None:
        for one in moves:
            line.device.copy(*one, line.handle)

    return verified(LOOP, work, lambda: Enqueued(line, work.plan.nbytes, issue))


class Blocks:
    """The blocks of one side, which torch gathers and scatters by index.

    Args:
        side: source or destination of a work.
        ids: block ids.
        block_runs: runs per block.
        paged: whether the outermost dim of the staging tensor is the block; otherwise it is the run.
    """

    def __init__(self, side: Side, ids: Any, block_runs: int, *, paged: bool) -> None:
        import torch

        self._dim, self._turned = 0 if side.paged else 1, side.paged != paged
        self._views = side.views(block_runs)
        self._ids = torch.from_numpy(ids).to(self._views[0].device)

    def _parts(self, staging: Any) -> list[tuple[Any, Any]]:
        """Return the side's views, each with its part of the staging tensor, in its order of dims."""
        held = staging.transpose(0, 1) if self._turned else staging
        return list(zip(self._views, held.chunk(len(self._views), 1 - self._dim), strict=True))

    def gather(self, staging: Any) -> None:
        """Copy the blocks into a staging tensor."""
        import torch

        for view, part in self._parts(staging):
            if self._turned:
                part.copy_(view.index_select(self._dim, self._ids))
            else:
                torch.index_select(view, self._dim, self._ids, out=part)

    def scatter(self, staging: Any) -> None:
        """Copy a staging tensor into the blocks."""
        for view, part in self._parts(staging):
            view.index_copy_(self._dim, self._ids, part)


def ends(work: Work) -> tuple[Blocks, Blocks, tuple[int, int, int]]:
    """Return the source, the destination, and the shape of the staging tensor, which has the pool's order."""
    shape = work.geometry
    paged = shape.host == "contiguous"
    src, dst = (
        Blocks(side, ids, shape.block_runs, paged=paged)
        for side, ids in ((work.src, work.src_ids), (work.dst, work.dst_ids))
    )
    outer = (shape.blocks, shape.block_runs) if paged else (shape.block_runs, shape.blocks)
    return src, dst, (*outer, shape.run_nbytes // 8)


def indexing(line: Line, work: Work) -> Baseline:
    """Make the baseline of torch: ``index_select``, one copy, ``index_copy_``. All CPU cores index the host's side."""
    import torch

    src, dst, shape = ends(work)
    load = work.geometry.direction == "load"

    def issue() -> None:
        host, device = (words.view(shape) for words in line.staging(work.plan.nbytes))
        with torch.cuda.stream(line.stream):
            src.gather(host if load else device)
            if load:
                device.copy_(host, non_blocking=True)
                dst.scatter(device)
            else:
                host.copy_(device, non_blocking=True)
                line.stream.synchronize()
                dst.scatter(host)

    return verified(INDEXING, work, lambda: Enqueued(line, work.plan.nbytes, issue))


def _indexing_on_cpu(work: Work) -> Baseline:
    """Make the baseline of ``index_select`` into a staging tensor and ``index_copy_`` out of it."""
    import torch

    src, dst, shape = ends(work)
    staging = torch.empty(shape, dtype=torch.int64)

    def move() -> None:
        src.gather(staging)
        dst.scatter(staging)

    return verified(INDEXING, work, lambda: AtOnce(work.plan.nbytes, move))


def _memcpy(work: Work) -> Baseline:
    """Make the baseline of one copy with the same bytes: a thread that moves blocks is hardly faster."""
    words = work.plan.nbytes // 8
    src, dst = (side.parts[0][:words].numpy() for side in (work.src, work.dst))

    def verify() -> None:
        dst[:] = 0
        np.copyto(dst, src)
        if not np.array_equal(dst, src):
            raise TransferError(f"{MEMCPY}: not every byte of {work.plan!r} arrived")

    return Baseline(lambda: AtOnce(work.plan.nbytes, partial(np.copyto, dst, src)), verify)
