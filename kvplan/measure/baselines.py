"""What else could move the same blocks: each rival by name, as a call that starts one transfer."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple, Protocol, Self

import numpy as np

from kvplan.errors import PathError, TransferError
from kvplan.measure.workload import Side, Work

BATCH = "cuMemcpyBatchAsync"
LOOP = "cuMemcpyAsync a run"
INDEXING = "torch indexing"
MEMCPY = "numpy memcpy"
MOST_DESCRIPTORS = 16_384  # a call; far more in one batch have crashed drivers
SWITCH = 5e-5  # seconds after which one thread lets another run; at Python's 5 ms, compute would run out of work
MOST_CALLS = 8192  # of the loop: more would take seconds


class Moved(NamedTuple):
    """What a finished transfer did: bytes, and seconds from its start to its end, by the GPU's events if it has one."""

    nbytes: int
    seconds: float


class Flight(Protocol):
    """A transfer of any kind."""

    def done(self) -> bool:
        """Whether it has finished."""
        ...

    def synchronize(self) -> None:
        """Wait for its end."""
        ...

    def result(self) -> Any:
        """What it did, with ``seconds``; waits for it."""
        ...


class Rival(NamedTuple):
    """One way to move one work.

    Attributes:
        begin: starts a transfer.
        verify: sees every byte arrive, or raises TransferError.
    """

    begin: Callable[[], Flight]
    verify: Callable[[], None]


Maker = Callable[[Work], Rival]


def rivals(device: str) -> Mapping[str, Maker]:
    """By name, what makes a rival for a work; it raises PathError where it cannot serve one.

    Args:
        device: ``"cpu"``, or ``"cuda:N"``; then torch with CUDA is needed.

    >>> sorted(rivals("cpu"))
    ['numpy memcpy', 'torch indexing']
    """
    if device == "cpu":
        return {MEMCPY: _memcpy, INDEXING: _indexing_on_cpu}
    line = _Line(device)
    return {BATCH: partial(_batch, line), LOOP: partial(_loop, line), INDEXING: partial(_indexing, line)}


def names(device: str) -> tuple[str, ...]:
    """Names of the rivals of a device, without asking it.

    >>> names("cuda:0")
    ('cuMemcpyBatchAsync', 'cuMemcpyAsync a run', 'torch indexing')
    """
    return (MEMCPY, INDEXING) if device == "cpu" else (BATCH, LOOP, INDEXING)


def _rival(name: str, moved: Work, begin: Callable[[], Flight]) -> Rival:
    return Rival(begin, lambda: moved.verify(name, lambda: begin().synchronize()))


class _Enqueued:
    """What a call put on a stream, between two events; they live as long as this."""

    def __init__(self, line: _Line, nbytes: int, issue: Callable[[], object]) -> None:
        import torch

        make: Any = torch.cuda.Event
        self._nbytes = nbytes
        self._before, self._after = make(enable_timing=True), make(enable_timing=True)
        with line.device.current():
            self._before.record(line.stream)
            issue()
            self._after.record(line.stream)

    def done(self) -> bool:
        """See :class:`Flight`."""
        return bool(self._after.query())

    def synchronize(self) -> None:
        """See :class:`Flight`."""
        self._after.synchronize()

    def result(self) -> Moved:
        """See :class:`Flight`."""
        self.synchronize()
        return Moved(self._nbytes, self._before.elapsed_time(self._after) / 1e3)


class _Line:
    """A GPU, and a stream of it that is nobody else's: torch's own come from a pool that goes round."""

    def __init__(self, device: str) -> None:
        import torch

        from kvplan.cuda.device import Device

        torch.empty(1, device=device)  # torch takes the context first
        self.device = Device(int(device.removeprefix("cuda:")))
        with self.device.current():
            self.handle = self.device.stream()
        open_stream: Any = torch.cuda.ExternalStream
        self.stream = open_stream(self.handle, device=device)
        self._name = device
        self._staging: tuple[Any, Any] | None = None

    def staging(self, nbytes: int) -> tuple[Any, Any]:
        """Words of pinned host memory and of the GPU, shared by all that ask: one transfer at a time uses them."""
        import torch

        words = nbytes // 8
        if self._staging is None or self._staging[0].numel() < words:
            self._staging = None  # the old ones go first
            self._staging = (
                torch.empty(words, dtype=torch.int64, pin_memory=True),
                torch.empty(words, dtype=torch.int64, device=self._name),
            )
        host, device = self._staging
        return host[:words], device[:words]


def _batch(line: _Line, moved: Work) -> Rival:
    """One descriptor a run. They are made beforehand and cost nothing here."""
    device = line.device
    if device.driver.cuMemcpyBatchAsync is None:
        raise PathError("the driver has no cuMemcpyBatchAsync: it came with 570")
    columns = tuple(np.ascontiguousarray(column, dtype=np.int64) for column in moved.plan.descriptors())
    src, dst, size = (column.ctypes.data for column in columns)
    count = columns[0].size

    def issue(_kept: object = columns) -> None:
        for first in range(0, count, MOST_DESCRIPTORS):
            at = 8 * first
            device.copy_batch(dst + at, src + at, size + at, min(MOST_DESCRIPTORS, count - first), line.handle)

    return _rival(BATCH, moved, lambda: _Enqueued(line, moved.plan.nbytes, issue))


def _loop(line: _Line, moved: Work) -> Rival:
    """One call a run."""
    if moved.geometry.runs > MOST_CALLS:
        raise PathError(f"as many calls as runs, and these are more than {MOST_CALLS:,}")
    src, dst, size = (column.tolist() for column in moved.plan.descriptors())
    moves = list(zip(dst, src, size, strict=True))

    def issue() -> None:
        for one in moves:
            line.device.copy(*one, line.handle)

    return _rival(LOOP, moved, lambda: _Enqueued(line, moved.plan.nbytes, issue))


class _Blocks:
    """One side's blocks, to be taken out of it, and put into it, by index.

    Args:
        side: of a work.
        ids: block ids.
        block_runs: runs of a block.
        paged: of the staging tensor: whether its outermost dim is the block; else it is the run.
    """

    def __init__(self, side: Side, ids: Any, block_runs: int, *, paged: bool) -> None:
        import torch

        blocks = side.layout.num_blocks
        self._dim = 0 if side.paged else 1
        self._view = side.flat.view(*((blocks, block_runs) if side.paged else (block_runs, blocks)), -1)
        self._ids = torch.from_numpy(ids).to(side.flat.device)
        self._turned = side.paged != paged

    def gather(self, staging: Any) -> None:
        """Copy the blocks into a staging tensor."""
        import torch

        if self._turned:
            staging.copy_(self._view.index_select(self._dim, self._ids).transpose(0, 1))
        else:
            torch.index_select(self._view, self._dim, self._ids, out=staging)

    def scatter(self, staging: Any) -> None:
        """Copy a staging tensor into the blocks."""
        self._view.index_copy_(self._dim, self._ids, staging.transpose(0, 1) if self._turned else staging)


def _ends(moved: Work) -> tuple[_Blocks, _Blocks, tuple[int, int, int]]:
    """Source, destination, and the shape of staging, which has the host's order."""
    shape = moved.geometry
    paged = shape.host == "contiguous"
    src, dst = (
        _Blocks(side, ids, shape.block_runs, paged=paged)
        for side, ids in ((moved.src, moved.src_ids), (moved.dst, moved.dst_ids))
    )
    outer = (shape.blocks, shape.block_runs) if paged else (shape.block_runs, shape.blocks)
    return src, dst, (*outer, shape.run_nbytes // 8)


def _indexing(line: _Line, moved: Work) -> Rival:
    """``index_select`` into a staging tensor, one copy, ``index_copy_``; the host's share runs on its own cores."""
    import torch

    src, dst, shape = _ends(moved)
    load = moved.geometry.direction == "load"

    def issue() -> None:
        host, device = (words.view(shape) for words in line.staging(moved.plan.nbytes))
        with torch.cuda.stream(line.stream):
            src.gather(host if load else device)
            if load:
                device.copy_(host, non_blocking=True)
                dst.scatter(device)
            else:
                host.copy_(device, non_blocking=True)
                line.stream.synchronize()
                dst.scatter(host)

    return _rival(INDEXING, moved, lambda: _Enqueued(line, moved.plan.nbytes, issue))


class _Done:
    """What a call did before it returned."""

    def __init__(self, nbytes: int, move: Callable[[], object]) -> None:
        start = time.perf_counter()
        move()
        self._moved = Moved(nbytes, time.perf_counter() - start)

    def done(self) -> bool:
        """See :class:`Flight`."""
        return True

    def synchronize(self) -> None:
        """See :class:`Flight`."""

    def result(self) -> Moved:
        """See :class:`Flight`."""
        return self._moved


def _indexing_on_cpu(moved: Work) -> Rival:
    """``index_select`` into a staging tensor, ``index_copy_`` out of it."""
    import torch

    src, dst, shape = _ends(moved)
    staging = torch.empty(shape, dtype=torch.int64)

    def move() -> None:
        src.gather(staging)
        dst.scatter(staging)

    return _rival(INDEXING, moved, lambda: _Done(moved.plan.nbytes, move))


def _memcpy(moved: Work) -> Rival:
    """As many bytes, in one piece: what moving blocks can hardly exceed on one thread."""
    words = moved.plan.nbytes // 8
    src, dst = (side.flat[:words].numpy() for side in (moved.src, moved.dst))

    def verify() -> None:
        dst[:] = 0
        np.copyto(dst, src)
        if not np.array_equal(dst, src):
            raise TransferError(f"{MEMCPY}: not every byte of {moved.plan!r} arrived")

    return Rival(lambda: _Done(moved.plan.nbytes, partial(np.copyto, dst, src)), verify)


class Aside:
    """Calls by a thread of their own, so that whoever keeps compute going is not held up by a call that takes long.

    >>> with Aside() as aside:
    ...     flight = aside.begin(lambda: _Done(8, lambda: None))
    ...     flight.synchronize()
    >>> flight.done(), flight.result().nbytes
    (True, 8)
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "kvplan-rival")
        self._interval = sys.getswitchinterval()

    def begin(self, begin: Callable[[], Flight]) -> Flight:
        """Start a transfer there; returns at once."""
        return _Asked(self._thread.submit(begin))

    def __enter__(self) -> Self:
        sys.setswitchinterval(SWITCH)
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown()
        sys.setswitchinterval(self._interval)


class _Asked:
    """A transfer that another thread starts."""

    def __init__(self, call: Future[Flight]) -> None:
        self._call = call

    def done(self) -> bool:
        """See :class:`Flight`."""
        return self._call.done() and self._call.result().done()

    def synchronize(self) -> None:
        """See :class:`Flight`."""
        self._call.result().synchronize()

    def result(self) -> Any:
        """See :class:`Flight`."""
        return self._call.result().result()
