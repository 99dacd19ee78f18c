"""Baselines: what others do to move the blocks of a work, a small function each, on the same buffers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kvplan.cuda.rows import copy_rows
from kvplan.errors import PathError, TransferError
from kvplan.measure.rig import Begin, Line
from kvplan.measure.rows import Ceilings
from kvplan.measure.workload import TO_CACHE, Buffers, Side, Work
from kvplan.plan.plan import Plan

if TYPE_CHECKING:
    from torch import Tensor

BATCH = "cuMemcpyBatchAsync"
LOOP = "cuMemcpyAsync a run"
INDEXING = "torch indexing"
MEMCPY, COPY = "numpy memcpy", "one large copy"  # the same bytes in one piece: on the CPU, and between GPUs
MOST_DESCRIPTORS = 16_384  # per call; batches with far more have crashed drivers
MOST_CALLS, MOST_COPIES = 8192, 131_072  # calls of the loop, and copies between GPUs: more would take seconds
SAMPLES = 9


class Baseline(NamedTuple):
    """A way to move one work.

    Attributes:
        begin: function that starts a transfer.
        verify: function that moves the work and raises TransferError if a byte did not arrive.
    """

    begin: Begin
    verify: Callable[[], None]


Maker = Callable[[Work], Baseline]


def names(device: str, peer: str | None = None) -> tuple[str, ...]:
    """Return the names of the baselines of a device, or of a GPU and its peer, without opening the device.

    >>> names("cpu"), names("cuda:0")
    (('numpy memcpy', 'torch indexing'), ('cuMemcpyBatchAsync', 'cuMemcpyAsync a run', 'torch indexing'))
    >>> names("cuda:0", "cuda:1")
    ('one large copy', 'cuMemcpyBatchAsync', 'torch indexing')
    """
    if device == "cpu":
        return MEMCPY, INDEXING
    return (BATCH, LOOP, INDEXING) if peer is None else (COPY, BATCH, INDEXING)


def makers(line: Line, peer: str | None = None) -> Mapping[str, Maker]:
    """Return, by name, the functions that make a baseline for a work; they raise PathError if it cannot move the work.

    Args:
        line: where the baselines issue their work.
        peer: the GPU that holds the pool; None for the host.
    """
    known: dict[str, Callable[[Line, Work], Baseline]] = {
        MEMCPY: one_piece, COPY: one_piece, BATCH: batch, LOOP: loop, INDEXING: indexing,
    }  # fmt: skip
    return {name: partial(known[name], line) for name in names(line.name, peer)}


def verified(name: str, work: Work, begin: Begin) -> Baseline:
    """Return a baseline that :meth:`kvplan.measure.workload.Work.verify` checks."""
    return Baseline(begin, lambda: work.verify(name, lambda: begin().synchronize()))


def issued(name: str, line: Line, work: Work, issue: Callable[[], object]) -> Baseline:
    """Return the baseline whose transfer is the call of a function, which issues the work of a line."""
    return verified(name, work, lambda: line.start(work.plan.nbytes, issue))


def batch(line: Line, work: Work, most: int | None = None) -> Baseline:
    """Make the baseline of the driver's batch call, with one descriptor per run; see :func:`batch_call`."""
    return issued(BATCH, line, work, batch_call(line, work.plan, most))


def batch_call(line: Line, plan: Plan, most: int | None = None) -> Callable[[], None]:
    """Return a function that calls cuMemcpyBatchAsync for a plan; the descriptors are made here, before it is timed.

    Args:
        line: stream of the calls.
        plan: the copies.
        most: most descriptors per call; None for as many as no driver has crashed at.

    Raises:
        PathError: the driver has no cuMemcpyBatchAsync, or the call would take seconds.
    """
    device = line.device
    if device.driver.cuMemcpyBatchAsync is None:
        raise PathError("the driver has no cuMemcpyBatchAsync: it came with 570")
    columns = np.stack(plan.descriptors())
    if plan.direction not in ("load", "store"):
        refuse_many(columns.shape[1])
    rows = copy_rows(columns, line.handle, least=0, most=most or MOST_DESCRIPTORS)

    def issue(_kept: object = columns) -> None:  # the rows name them by address
        device.issue(rows)

    return issue


def refuse_many(copies: int, most: int = MOST_COPIES) -> None:
    """Check that a transfer with a copy for each run takes less than seconds.

    Raises:
        PathError: there are too many copies.
    """
    if copies > most:
        raise PathError(f"it makes a copy for each run, and {copies:,} runs are more than {most:,}")


def loop(line: Line, work: Work) -> Baseline:
    """Make the baseline of one cuMemcpyAsync call per run."""
    refuse_many(work.geometry.runs, MOST_CALLS)
    src, dst, size = (column.tolist() for column in work.plan.descriptors())
    moves = list(zip(dst, src, size, strict=True))

    def issue() -> None:
        for move in moves:
            line.device.copy(*move, line.handle)

    return issued(LOOP, line, work, issue)


def large_copy(line: Line, src: Tensor, dst: Tensor) -> Begin:
    """Return a function that copies one tensor to another, of as many bytes, in one piece."""
    nbytes = src.numel() * src.element_size()
    if line.name == "cpu":
        issue: Callable[[], object] = partial(np.copyto, dst.numpy(), src.numpy())
    else:
        issue = partial(line.device.copy, dst.data_ptr(), src.data_ptr(), nbytes, line.handle)
    return lambda: line.start(nbytes, issue)


def one_piece(line: Line, work: Work) -> Baseline:
    """Make the baseline of one copy with the same number of bytes: the limit of the link, or of one thread."""
    import torch

    words = work.plan.nbytes // 8
    src, dst = (side.parts[0].view(-1)[:words] for side in (work.src, work.dst))
    begin = large_copy(line, src, dst)

    def verify() -> None:
        dst.bitwise_not_()
        if dst.is_cuda:
            torch.cuda.synchronize(dst.device)
        begin().synchronize()
        if not torch.equal(dst, src.to(dst.device)):
            raise TransferError(f"{MEMCPY if line.name == 'cpu' else COPY}: not every byte of {8 * words} arrived")

    return Baseline(begin, verify)


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
        self.device = str(self._views[0].device)
        self._ids = torch.from_numpy(ids).to(self.device)

    def _parts(self, staging: Any) -> list[tuple[Any, Any]]:
        """Return the side's views, each with its part of the staging tensor, in its order of dims."""
        turned = staging.transpose(0, 1) if self._turned else staging
        return list(zip(self._views, turned.chunk(len(self._views), 1 - self._dim), strict=True))

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


def indexing(line: Line, work: Work) -> Baseline:
    """Make the baseline of torch: ``index_select``, one copy if the sides are apart, ``index_copy_``.

    All CPU cores index the host's side. The staging tensors have the pool's order. Between GPUs, torch's copy orders
    the current streams of both.
    """
    import torch

    shape, paged = work.geometry, work.geometry.host == "contiguous"
    src, dst = (
        Blocks(side, ids, shape.block_runs, paged=paged)
        for side, ids in ((work.src, work.src_ids), (work.dst, work.dst_ids))
    )
    outer = (shape.blocks, shape.block_runs) if paged else (shape.block_runs, shape.blocks)

    def move() -> None:
        gathered, arrived = (
            line.staging(side.device, work.plan.nbytes).view(*outer, shape.run_nbytes // 8) for side in (src, dst)
        )
        src.gather(gathered)
        if src.device != dst.device:
            arrived.copy_(gathered, non_blocking=True)
            if dst.device == "cpu":
                line.stream.synchronize()
        dst.scatter(arrived)

    def issue() -> None:
        with torch.cuda.stream(line.stream), torch.cuda.stream((line.far or line).stream):
            move()

    return issued(INDEXING, line, work, move if line.name == "cpu" else issue)


def copy_rates(buffers: Buffers, routes: Collection[str]) -> dict[str, float]:
    """Measure GB/s of one large copy for each route; the best of several, as other processes may use the link.

    Host buffers of a GPU, and those within it, also give the bytes read plus the bytes written within its memory
    (``"memory"``). For buffers on two GPUs, peer access must be enabled: the driver would copy through the host.
    """
    pool, cache = buffers.host[: buffers.nbytes], buffers.other
    line, half = Line(buffers.device), buffers.nbytes // 2

    def rate(src: Tensor, dst: Tensor) -> float:
        begin = large_copy(line, src, dst)
        taken: list[float] = [begin().result().seconds for _ in range(SAMPLES + 1)]
        return src.numel() / min(taken[1:]) / 1e9

    found = {route: rate(*((pool, cache) if route in TO_CACHE else (cache, pool))) for route in routes}
    if "device" in found:
        return found | {"memory": 2 * found["device"]}
    if buffers.peer is None and buffers.device != "cpu":
        found["memory"] = 2 * rate(cache[half : 2 * half], cache[:half])
    return found


def ceilings(buffers: Buffers, routes: Collection[str]) -> Ceilings:
    """Measure the ceilings of some routes between some buffers; see :func:`copy_rates`."""
    what = "memcpy" if buffers.device == "cpu" else "memory" if buffers.peer == buffers.device else "link"
    found = copy_rates(buffers, routes)
    return Ceilings(**{route: found[route] for route in routes}, what=what, hard=what == "link")


def multiprocessors(device: str) -> int:
    """Return the number of SMs of a GPU."""
    import torch

    return int(torch.cuda.get_device_properties(device).multi_processor_count)
