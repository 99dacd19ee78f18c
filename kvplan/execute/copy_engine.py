"""The copy-engine paths: batches of flat descriptors, and 2-D copies. Neither takes an SM."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from kvplan.errors import TransferError
from kvplan.execute.cuda import INVALID_VALUE, Device, DriverError
from kvplan.execute.kernel_path import copies_of
from kvplan.execute.policy import Policy
from kvplan.lower import exploded, flat, strided
from kvplan.plan import Plan
from kvplan.program import Int64Array
from kvplan.twin import Descriptors

if TYPE_CHECKING:
    from kvplan.execute.flight import DeviceTransfer
    from kvplan.execute.lane import Lane
    from kvplan.execute.runtime import Runtime

# Copies of one call. The engine begins when the call returns, so large batches go in slices; and 52,000 copies in one
# call have crashed a driver (580).
SLICE = 4096
SLOW = 2048  # copies: more of them are issued by the lane's own thread, at 0.4 to 3 us each
SLOW_2D = 256  # 2-D copies and single copies, at 2 to 3 us each
# Copies from host memory of up to 24 KiB lose bytes in a batch, or end the context, where their sizes differ: drivers
# before some later one write them into their own queue of commands, and past its end (benchmarks/gpu/batch_bytes.py;
# 580 on H100 and H200). They go by a call each.
INLINED = 28 << 10
# Many copies from here on are faster over several streams; shorter ones are bounded by the CPU, whatever the streams.
PARALLEL_NBYTES, PARALLEL_COPIES, PARALLEL_STREAMS = 28 << 10, 64, 4
UNIFIED = 4  # CUmemorytype: the driver tells from the address


class CopyEnginePath:
    """cuMemcpyBatchAsync over the flat lowering, by address; single copies where the driver is older than 12.8."""

    name = "copy_engine"
    capturable = False
    in_order = True

    def __init__(self, runtime: Runtime, policy: Policy) -> None:
        self._runtime = runtime
        self._streams = policy.streams

    def streams(self, lane: Lane, direction: str) -> tuple[int, int]:
        """Where a transfer begins and where it ends."""
        del direction
        return lane.copy, lane.copy

    def slow(self, plan: Plan) -> bool:
        """Whether issuing it takes the CPU long."""
        copies = copies_of(plan)
        return copies > (SLOW_2D if plan.direction == "load" and plan.nbytes < INLINED * copies else SLOW)

    def prepare(self, transfer: DeviceTransfer, plan: Plan, lane: Lane) -> Callable[[], None]:
        """Lower the plan; what is returned issues it on the lane's copy stream, and on side streams if asked for."""
        made = flat(plan.parts, self._runtime.seams(plan), None)
        count = made.size.size
        device = self._runtime.device
        wanted = min(self._streams or _streams(plan, count), count)
        slices = max(-(-count // SLICE), wanted)
        edges = np.linspace(0, count, slices + 1).astype(int).tolist()
        streams = [lane.copy, *lane.sides(wanted - 1)]
        events = [transfer.event() for _ in streams]
        transfer.copies += count
        load = plan.direction == "load"
        transfer.launches += slices if batches(device, made.size, load=load) else count
        return partial(self._issue, made, edges, streams, events, load=load)

    def _issue(self, made: Descriptors, edges: list[int], streams: list[int], events: list[int], *, load: bool) -> None:
        device, first = self._runtime.device, streams[0]
        if len(streams) > 1:
            device.record(events[0], first)
        for stream in streams[1:]:
            device.wait(stream, events[0])
        for k, (start, stop) in enumerate(pairwise(edges)):
            copy_all(device, made, start, stop, streams[k % len(streams)], load=load)
        for stream, event in zip(streams[1:], events[1:], strict=True):
            device.record(event, stream)
            device.wait(first, event)


def _streams(plan: Plan, count: int) -> int:
    """Copy streams for a plan of ``count`` descriptors, where nobody said how many."""
    return PARALLEL_STREAMS if plan.nbytes >= PARALLEL_NBYTES * count and count >= PARALLEL_COPIES else 1


class CopyEngine2DPath:
    """2-D copies over the strided lowering, one for each run and unit. What has no rows goes as flat descriptors."""

    name = "copy_engine_2d"
    capturable = False
    in_order = True

    def __init__(self, runtime: Runtime, policy: Policy) -> None:
        del policy
        self._runtime = runtime

    def streams(self, lane: Lane, direction: str) -> tuple[int, int]:
        """Where a transfer begins and where it ends."""
        del direction
        return lane.copy, lane.copy

    def slow(self, plan: Plan) -> bool:
        """Whether issuing it takes the CPU long."""
        return bool(sum(part.units.shape[1] * len(part.group.runs) for part in plan.parts) > SLOW_2D)

    def prepare(self, transfer: DeviceTransfer, plan: Plan, lane: Lane) -> Callable[[], None]:
        """Lower the plan; what is returned issues it on the lane's copy stream."""
        device = self._runtime.device
        rows = np.asarray(strided(plan.parts, self._runtime.seams(plan)))
        # A pitch is limited, to 2 GiB or so: layers of a large cache lie further apart.
        flat_rows = (rows[:, 3] == 1) | (rows[:, 4:6].max(axis=1, initial=0) > device.max_pitch)
        transfer.copies += int(rows[:, 3].sum())
        rest, load = exploded(rows[flat_rows]), plan.direction == "load"
        return partial(self._issue, transfer, rows[~flat_rows], rest, lane.copy, load=load)

    def _issue(self, transfer: DeviceTransfer, rows: Int64Array, rest: Descriptors, stream: int, *, load: bool) -> None:
        device, boxes = self._runtime.device, parameters(rows)
        first, step = boxes.ctypes.data, boxes.strides[0]
        for k in range(len(boxes)):
            code = device.copy_2d(first + k * step, stream)
            if code == INVALID_VALUE:  # rows of several allocations; nothing was issued, so they go one by one
                made = exploded(rows[k : k + 1])
                copy_all(device, made, 0, made.size.size, stream, load=load)
            elif code:
                src, dst, width, height, *_ = rows[k].tolist()
                what = f"2-D copy {k} of {len(boxes)}, {height} rows of {width} bytes from {src:#x} to {dst:#x}"
                device.driver.check("cuMemcpy2DAsync", code, what)
        count = rest.size.size
        copy_all(device, rest, 0, count, stream, load=load)
        transfer.launches += len(boxes)
        transfer.launches += -(-count // SLICE) if batches(device, rest.size, load=load) else count


def batches(device: Device, size: Int64Array, *, load: bool) -> bool:
    """Whether copies may go in batches: not small ones from host memory, and only if the driver has the call."""
    return device.driver.cuMemcpyBatchAsync is not None and not (load and bool((size < INLINED).any()))


def copy_all(device: Device, made: Descriptors, first: int, last: int, stream: int, *, load: bool) -> None:
    """Issue descriptors ``first`` to ``last``: in batches, or by a call each where they may not.

    Args:
        device: the GPU.
        made: descriptors.
        first, last: which.
        stream: its handle.
        load: whether the source is host memory.

    Raises:
        TransferError: with the first that the driver refuses, where it says which.
    """
    size = made.size[first:last]
    if batches(device, size, load=load):
        _batched(device, made, np.arange(first, last), stream)
        return
    single = size < INLINED if device.driver.cuMemcpyBatchAsync is not None else np.ones(size.size, np.bool_)
    _batched(device, made, first + np.flatnonzero(~single), stream)
    rows = first + np.flatnonzero(single)
    try:
        device.copy_each(made.dst[rows], made.src[rows], made.size[rows], stream)
    except DriverError as error:
        raise offending(error, made, rows) from error


def _batched(device: Device, made: Descriptors, rows: Int64Array, stream: int) -> None:
    src, dst, size = (column[rows] for column in made)
    for at in range(0, rows.size, SLICE):
        first, count = 8 * at, min(SLICE, rows.size - at)
        try:
            device.copy_batch(dst.ctypes.data + first, src.ctypes.data + first, size.ctypes.data + first, count, stream)
        except DriverError as error:
            raise offending(error, made, rows[at:]) from error


def offending(error: DriverError, columns: Sequence[Int64Array], rows: Sequence[int] | Int64Array) -> TransferError:
    """The error of a batch, with the descriptor that the driver names.

    Args:
        error: what the call raised.
        columns: source, destination and bytes of all descriptors.
        rows: those that the batch begins with.
    """
    if error.at is None:
        return error
    k = int(rows[error.at])
    src, dst, nbytes = (int(column[k]) for column in columns)
    return TransferError(f"{error}: descriptor {k} of {columns[0].size}, {nbytes} bytes from {src:#x} to {dst:#x}")


def parameters(rows: Int64Array) -> Int64Array:
    """CUDA_MEMCPY2D of every row: (n, 16) int64, the structure's words.

    >>> parameters(np.array([[1, 2, 3, 4, 5, 6]])).tolist()
    [[0, 0, 4, 0, 1, 0, 5, 0, 0, 4, 0, 2, 0, 6, 3, 4]]
    """
    made = np.zeros((len(rows), 16), dtype=np.int64)
    made[:, (2, 9)] = UNIFIED
    made[:, (4, 11, 14, 15, 6, 13)] = rows
    return made
