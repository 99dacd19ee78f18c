"""The transfers that are measured: caches and pools of random bytes, plans, a comparison of every byte, and baselines.

The cache is memory of the measured GPU. The pool is host memory, or memory of a GPU: of another one, or of the same.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from kvplan.cuda.rows import copy_rows
from kvplan.errors import KVPlanError, PathError, TransferError
from kvplan.layout.kvlayout import KVLayout
from kvplan.measure.rig import Begin, Line
from kvplan.plan.copy_program import compile
from kvplan.plan.plan import Plan

Tensor = Any  # torch's; torch is imported where it is needed
DIRECTIONS = ("load", "store")
TO_CACHE = ("load", "pull", "device")  # routes from the pool to the cache; the others go from the cache to the pool
# Order of the runs in the pool: the runs of a block one after another, or each beside the same run of other blocks.
HOSTS = ("contiguous", "scattered")
WORD = 8  # bytes: runs are whole words of int64
PIECE = 16 << 20  # bytes of random numbers made at a time
BATCH = "cuMemcpyBatchAsync"
INDEXING = "torch indexing"
MEMCPY, COPY = "numpy memcpy", "one large copy"  # the same bytes in one piece: on the CPU, and between GPUs
MOST_DESCRIPTORS = 16_384  # per call; batches with far more have crashed drivers
MOST_COPIES = 131_072  # copies between GPUs: more would take seconds
SAMPLES = 9


class Geometry(NamedTuple):
    """The route, the sizes and the pool's order of a transfer.

    Attributes:
        direction: one of :data:`kvplan.cost.policy.ROUTES`; it must suit the pool of the :class:`Buffers`.
        host: ``"contiguous"`` if the runs of a block lie one after another in the pool; ``"scattered"`` if no two runs
            of a block touch there.
        run_nbytes: bytes per run: one layer's K, or V, of one block.
        runs: number of runs in the transfer.
        block_runs: number of runs per block.
    """

    direction: str
    host: str
    run_nbytes: int
    runs: int
    block_runs: int

    @property
    def nbytes(self) -> int:
        """Return the bytes of the transfer.

        >>> Geometry("load", "contiguous", 8192, 160, 16).nbytes
        1310720
        """
        return self.run_nbytes * self.runs

    @property
    def blocks(self) -> int:
        """Return the number of blocks of the transfer."""
        return self.runs // self.block_runs


class Buffers:
    """Flat buffers of random bytes on both sides, in which works place their caches.

    Args:
        nbytes: bytes of the device's side, and of the largest transfer.
        device: ``"cuda:0"``; or ``"cpu"``, with both buffers in CPU memory.
        host_nbytes: bytes of the pool, by default ``nbytes``. The blocks of a large pool lie far apart, and move more
            slowly than the blocks of a small pool.
        peer: the GPU that holds the pool, such as ``"cuda:1"``, or ``device`` itself; by default it is host memory,
            which is pinned if the device is a GPU.

    Attributes:
        nbytes, device, peer: as given.
        host: the pool, as flat bytes.
        other: the cache's side, as flat bytes.

    Raises:
        KVPlanError: there is too little memory.
    """

    def __init__(self, nbytes: int, device: str, host_nbytes: int | None = None, peer: str | None = None) -> None:
        import torch

        self.nbytes, self.device, self.peer = nbytes, device, peer
        try:
            pinned = peer is None and device != "cpu"
            self.host = torch.empty(host_nbytes or nbytes, dtype=torch.uint8, device=peer, pin_memory=pinned)
            self.other = torch.empty(nbytes, dtype=torch.uint8, device=device)
        except RuntimeError as error:
            asked = f"{host_nbytes or nbytes} bytes of {peer or 'the host'} and {nbytes} of {device}"
            raise KVPlanError(f"cannot allocate {asked}: {str(error).splitlines()[0]}") from None
        for flat in (self.other, self.host):
            fill_random(flat[: flat.numel() // WORD * WORD].view(torch.int64), peer or device)


def fill_random(words: Tensor, device: str) -> None:
    """Fill a flat int64 tensor with random words, made on ``device``: one CPU thread takes seconds for a gigabyte."""
    import torch

    for first in range(0, words.numel(), PIECE // WORD):
        piece = words[first : first + PIECE // WORD]
        piece.copy_(torch.randint(1, 1 << 62, piece.shape, dtype=torch.int64, device=device))


class Side(NamedTuple):
    """The source or the destination of a work.

    Attributes:
        layout: the layout from which kvplan plans.
        parts: its tensors as flat int64 words: one tensor; or one for each layer if blocks are not the outermost dim.
        paged: whether blocks are its outermost dim.
    """

    layout: KVLayout
    parts: tuple[Tensor, ...]
    paged: bool

    def views(self, block_runs: int) -> list[Tensor]:
        """Return each part as an array (block, run, word) if the side is paged, otherwise (run, block, word)."""
        blocks = self.layout.num_blocks
        runs = block_runs // len(self.parts)
        return [part.view(*((blocks, runs) if self.paged else (runs, blocks)), -1) for part in self.parts]

    def select(self, ids: Tensor, block_runs: int) -> Tensor:
        """Return the words of some blocks as an array (run of a block, block, word).

        They are gathered and compared on the device of ``ids``, to which a side of other memory is copied as a whole.
        """
        import torch

        views = [view.to(ids.device) for view in self.views(block_runs)]
        if self.paged:
            return views[0].index_select(0, ids).transpose(0, 1)
        return torch.cat([view.index_select(1, ids) for view in views])


class Work(NamedTuple):
    """One transfer of random blocks in random order, no block twice.

    Attributes:
        geometry: sizes and direction of the transfer.
        plan: plan of the transfer.
        src, dst: source and destination.
        src_ids, dst_ids: block ids of the source and of the destination.
        device: name of the device, such as ``"cuda:0"``.
    """

    geometry: Geometry
    plan: Plan
    src: Side
    dst: Side
    src_ids: np.ndarray[Any, np.dtype[np.int64]]
    dst_ids: np.ndarray[Any, np.dtype[np.int64]]
    device: str

    def verify(self, name: str, move: Callable[[], object]) -> None:
        """Invert the destination's bytes, move the plan, and compare every byte.

        Args:
            name: name of the path or baseline, for the error message.
            move: function that moves the plan and returns when all bytes have arrived.

        Raises:
            TransferError: a byte did not arrive.
        """
        import torch

        src, dst = (torch.from_numpy(ids).to(self.device) for ids in (self.src_ids, self.dst_ids))
        block_runs = self.geometry.block_runs
        expected = self.src.select(src, block_runs)
        invert(*self.dst.parts)
        move()
        moved = self.dst.select(dst, block_runs)
        wrong = int((moved != expected).any(dim=-1).sum())
        if wrong:
            words = f"{wrong} of {self.geometry.runs} runs are wrong"
            raise TransferError(f"{name}: not every byte of {self.plan!r} arrived: {words}: {self.geometry}")


def invert(*parts: Tensor) -> None:
    """Invert all bits, so that every byte differs from the byte that arrives, and wait until that is done."""
    import torch

    for part in parts:
        part.bitwise_not_()
    for part in parts:
        if part.is_cuda:
            torch.cuda.synchronize(part.device)


def work(buffers: Buffers, geometry: Geometry, seed: int = 0) -> Work:
    """Place a cache and a pool in the buffers, and plan random blocks: all blocks of the cache, some of the pool.

    Raises:
        KVPlanError: the geometry is wrong, or larger than the buffers.
    """
    if geometry.nbytes > buffers.nbytes:
        raise KVPlanError(f"{geometry.nbytes} bytes do not fit into buffers of {buffers.nbytes}")
    block_nbytes = geometry.run_nbytes * geometry.block_runs
    pooled = buffers.host.numel() // block_nbytes
    # If there were one block, its runs would touch on the device, too, and be one run.
    held = min(max(geometry.blocks, 2), buffers.nbytes // block_nbytes)
    if min(pooled, held) < 2:
        raise KVPlanError(
            f"one block of {block_nbytes} bytes fills the buffers, and its runs would be one: give more memory"
        )
    host = side_of(buffers.host, geometry, pooled, paged=geometry.host == "contiguous")
    device = side_of(buffers.other, geometry, held, paged=False)
    return between(host, device, geometry, buffers.device, seed)


def between(host: Side, device: Side, geometry: Geometry, name: str, seed: int = 0) -> Work:
    """Plan random blocks from one side to the other, in random order.

    Args:
        host, device: the pool and the cache.
        geometry: number of blocks, and route.
        name: name of the device, such as ``"cuda:0"``.
        seed: seed of the random block ids.
    """
    src, dst = (host, device) if geometry.direction in TO_CACHE else (device, host)
    random = np.random.default_rng((seed, geometry.runs, geometry.run_nbytes))
    src_ids, dst_ids = (
        random.permutation(side.layout.num_blocks)[: geometry.blocks].astype(np.int64) for side in (src, dst)
    )
    plan = compile(src.layout, dst.layout).plan(src_ids, dst_ids)
    return Work(geometry, plan, src, dst, src_ids, dst_ids, name)


def side_of(flat: Tensor, geometry: Geometry, blocks: int, *, paged: bool) -> Side:
    """Place a cache or a pool at the start of a flat buffer.

    Args:
        flat: the buffer, as bytes.
        geometry: bytes per run, and runs per block.
        blocks: number of blocks.
        paged: whether blocks are the outermost dim; otherwise each layer has its blocks.
    """
    import torch

    part = flat[: geometry.run_nbytes * geometry.block_runs * blocks]
    elements, layers = part.view(torch.int64), geometry.block_runs // 2
    if paged:
        shaped: Any = elements.view(blocks, layers, 2, 1, -1)
        return Side(KVLayout.from_tensors("block layer kv token dim", shaped), (elements,), paged)
    shaped = list(elements.view(layers, 2, blocks, 1, -1).unbind(0))
    return Side(KVLayout.from_tensors("layer: kv block token dim", shaped), (elements,), paged)


# Baselines: what others do to move the blocks of a work, a small function each, on the same buffers.


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
    (('numpy memcpy', 'torch indexing'), ('cuMemcpyBatchAsync', 'torch indexing'))
    >>> names("cuda:0", "cuda:1")
    ('one large copy', 'cuMemcpyBatchAsync', 'torch indexing')
    """
    if device == "cpu":
        return MEMCPY, INDEXING
    return (BATCH, INDEXING) if peer is None else (COPY, BATCH, INDEXING)


def makers(line: Line, peer: str | None = None) -> Mapping[str, Maker]:
    """Return, by name, the functions that make a baseline for a work; they raise PathError if it cannot move the work.

    Args:
        line: where the baselines issue their work.
        peer: the GPU that holds the pool; None for the host.
    """
    known = {MEMCPY: one_piece, COPY: one_piece, BATCH: batch, INDEXING: indexing}
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


def refuse_many(copies: int) -> None:
    """Check that a transfer with a copy for each run takes less than seconds.

    Raises:
        PathError: there are too many copies.
    """
    if copies > MOST_COPIES:
        raise PathError(f"it makes a copy for each run, and {copies:,} runs are more than {MOST_COPIES:,}")


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
        invert(dst)
        begin().synchronize()
        if not torch.equal(dst, src.to(dst.device)):
            raise TransferError(f"{MEMCPY if line.name == 'cpu' else COPY}: not every byte of {8 * words} arrived")

    return Baseline(begin, verify)


def indexing(line: Line, work: Work) -> Baseline:
    """Make the baseline of torch: ``index_select``, one copy if the sides are apart, ``index_copy_``.

    All CPU cores index the host's side. The staging tensors have the pool's order. Between GPUs, torch's copy orders
    the current streams of both.
    """
    import torch

    shape, paged = work.geometry, work.geometry.host == "contiguous"
    src, dst = (
        _Blocks(side, ids, shape.block_runs, paged=paged)
        for side, ids in ((work.src, work.src_ids), (work.dst, work.dst_ids))
    )
    outer = (shape.blocks, shape.block_runs) if paged else (shape.block_runs, shape.blocks)

    def staging(device: str) -> Tensor:
        pinned = device == "cpu" and line.name != "cpu"
        return torch.empty(*outer, shape.run_nbytes // 8, dtype=torch.int64, device=device, pin_memory=pinned)

    gathered = staging(src.device)
    arrived = gathered if src.device == dst.device else staging(dst.device)

    def move() -> None:
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


class _Blocks:
    """The blocks of one side, and staging tensors (block, run, word) if paged, otherwise (run, block, word)."""

    def __init__(self, side: Side, ids: Any, block_runs: int, *, paged: bool) -> None:
        import torch

        self._dim, self._turned = 0 if side.paged else 1, side.paged != paged
        self._views = side.views(block_runs)
        self.device = str(self._views[0].device)
        self._ids = torch.from_numpy(ids).to(self.device)

    def _parts(self, staging: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return the side's views, each with its part of the staging tensor, in its order of dims."""
        turned = staging.transpose(0, 1) if self._turned else staging
        return list(zip(self._views, turned.chunk(len(self._views), 1 - self._dim), strict=True))

    def gather(self, staging: Tensor) -> None:
        import torch

        for view, part in self._parts(staging):
            if self._turned:
                part.copy_(view.index_select(self._dim, self._ids))
            else:
                torch.index_select(view, self._dim, self._ids, out=part)

    def scatter(self, staging: Tensor) -> None:
        for view, part in self._parts(staging):
            view.index_copy_(self._dim, self._ids, part)


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
        nbytes: int = src.numel()
        return nbytes / min(taken[1:]) / 1e9

    found = {route: rate(*((pool, cache) if route in TO_CACHE else (cache, pool))) for route in routes}
    if "device" in found:
        return found | {"memory": 2 * found["device"]}
    if buffers.peer is None and buffers.device != "cpu":
        found["memory"] = 2 * rate(cache[half : 2 * half], cache[:half])
    return found
