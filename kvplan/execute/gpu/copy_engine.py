"""The copy-engine paths: batches of flat descriptors, and 2-D copies. Neither takes an SM."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, NoReturn
from weakref import WeakKeyDictionary

import numpy as np

from kvplan.cost.policy import Policy
from kvplan.cuda.device import INVALID_VALUE, Device, DriverError, Uncaptured
from kvplan.errors import TransferError
from kvplan.plan.descriptors import exploded, flat, strided, two_dimensional
from kvplan.plan.layers import split_layers
from kvplan.plan.loops_numpy import Descriptors
from kvplan.plan.plan import Plan
from kvplan.program.program import Int64Array, RunGroup

if TYPE_CHECKING:
    from kvplan.execute.gpu.backend import Runtime
    from kvplan.execute.gpu.device_transfer import DeviceTransfer
    from kvplan.execute.gpu.lane import Lane

# Copies of one call. The engine begins when the call returns, so large batches go in slices; and 52,000 copies in one
# call have crashed a driver (580).
SLICE = 4096
# Batches lose bytes of copies of up to 24 KiB from host memory, or end the context or the process, where such sizes
# differ within a call: the driver writes them into its queue of commands, and past its end. Seen of 580 on H100 and
# H200 (benchmarks/gpu/batch_bytes.py). The size from which on it does otherwise is the same on every GPU looked at.
INLINED = 28 << 10
# Calls of one transfer in flight on a stream, twice that at most. The driver's queue has an end, of about a thousand; a
# call that finds it full waits for the GPU with the driver's lock held, and all other threads' calls wait for it.
STEP = 256
SLOW_2D = 256  # 2-D copies and single copies, at 2 to 3 us each: more of them are issued by the lane's own thread
SLOW = 2048  # copies: more of them are issued by the lane's own thread, at 0.4 to 3 us each
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

    def make_ready(self, plan: Plan) -> None:
        """Nothing is to be compiled but the loops that all paths have."""

    def slow(self, plan: Plan, groups: int = 1) -> bool:
        """Whether issuing it takes the CPU long, cut into so many groups of layers."""
        del groups
        held = [(part.units.shape[1], part.group.packed[2]) for part in plan.parts]
        return long_to_issue(self._runtime.device, plan.direction, held, SLOW)

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
        transfer.launches += count if alone(device, plan.direction, made.size) else slices
        return partial(self._issue, transfer, made, edges, streams, events)

    def _issue(
        self, transfer: DeviceTransfer, made: Descriptors, edges: list[int], streams: list[int], events: list[int]
    ) -> None:
        device, first = self._runtime.device, streams[0]
        if len(streams) > 1:
            device.record(events[0], first)
        for stream in streams[1:]:
            device.wait(stream, events[0])
        for k, (start, stop) in enumerate(pairwise(edges)):
            copy_all(device, transfer, made, start, stop, streams[k % len(streams)])
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
        self._made: WeakKeyDictionary[RunGroup, tuple[int, Int64Array]] = WeakKeyDictionary()

    def streams(self, lane: Lane, direction: str) -> tuple[int, int]:
        """Where a transfer begins and where it ends."""
        del direction
        return lane.copy, lane.copy

    def make_ready(self, plan: Plan) -> None:
        """Nothing is to be compiled but the loops that all paths have."""

    def slow(self, plan: Plan, groups: int = 1) -> bool:
        """Whether issuing it takes the CPU long, cut into so many groups of layers."""
        # Each group of layers has calls of its own: loops over layers are cut, and another may then be the longest.
        plans = [plan] if groups == 1 else [one for _, one in split_layers(plan, groups)]
        held = [(part.units.shape[1], *self._made_of(part.group)) for one in plans for part in one.parts]
        if sum([units * calls for units, calls, _ in held]) > SLOW_2D:
            return True
        rest = [(units, sizes) for units, _, sizes in held if sizes.size]
        return bool(rest) and long_to_issue(self._runtime.device, plan.direction, rest, SLOW)

    def _made_of(self, group: RunGroup) -> tuple[int, Int64Array]:
        """Of one unit: how many 2-D copies, and bytes of each row that goes as a flat descriptor; seams apart."""
        made = self._made.get(group)
        if made is None:
            pieces = [piece for run in group.runs for piece in two_dimensional(run)]
            near = [bool(p.loops) and max(p.loops[0][1:]) <= self._runtime.device.max_pitch for p in pieces]
            rest = [(p.nbytes, p.copies) for p, taken in zip(pieces, near, strict=True) if not taken]
            sizes = np.repeat([nbytes for nbytes, _ in rest], [count for _, count in rest]).astype(np.int64)
            made = self._made[group] = sum(near), sizes
        return made

    def prepare(self, transfer: DeviceTransfer, plan: Plan, lane: Lane) -> Callable[[], None]:
        """Lower the plan; what is returned issues it on the lane's copy stream."""
        device = self._runtime.device
        rows = np.asarray(strided(plan.parts, self._runtime.seams(plan)))
        # A pitch is limited, to 2 GiB or so: layers of a large cache lie further apart.
        flat_rows = (rows[:, 3] == 1) | (rows[:, 4:6].max(axis=1, initial=0) > device.max_pitch)
        transfer.copies += int(rows[:, 3].sum())
        return partial(self._issue, transfer, rows[~flat_rows], exploded(rows[flat_rows]), lane.copy)

    def _issue(self, transfer: DeviceTransfer, rows: Int64Array, rest: Descriptors, stream: int) -> None:
        device, boxes = self._runtime.device, parameters(rows)
        first, step = boxes.ctypes.data, boxes.strides[0]
        for k in range(len(boxes)):
            code = device.copy_2d(first + k * step, stream)
            pace(device, transfer, 1, stream)
            if code == INVALID_VALUE:  # rows of several allocations; nothing was issued, so they go one by one
                made = exploded(rows[k : k + 1])
                transfer.launches += made.size.size - 1
                copy_all(device, transfer, made, 0, made.size.size, stream)
            elif code:
                src, dst, width, height, *_ = rows[k].tolist()
                what = f"2-D copy {k} of {len(boxes)}, {height} rows of {width} bytes from {src:#x} to {dst:#x}"
                device.driver.check("cuMemcpy2DAsync", code, what)
        count = rest.size.size
        copy_all(device, transfer, rest, 0, count, stream)
        transfer.launches += len(boxes)
        transfer.launches += count if alone(device, transfer.plan.direction, rest.size) else -(-count // SLICE)


def parameters(rows: Int64Array) -> Int64Array:
    """CUDA_MEMCPY2D of every row: (n, 16) int64, the structure's words.

    >>> parameters(np.array([[1, 2, 3, 4, 5, 6]])).tolist()
    [[0, 0, 4, 0, 1, 0, 5, 0, 0, 4, 0, 2, 0, 6, 3, 4]]
    """
    made = np.zeros((len(rows), 16), dtype=np.int64)
    made[:, (2, 9)] = UNIFIED
    made[:, (4, 11, 14, 15, 6, 13)] = rows
    return made


def pace(device: Device, transfer: DeviceTransfer, calls: int, stream: int) -> None:
    """Hold the lane's thread back where the calls of one transfer would fill the driver's queue.

    Each :data:`STEP` calls are followed by an event, and the event before that is waited for.

    Args:
        device: the GPU.
        transfer: whose calls they are.
        calls: how many were issued just now.
        stream: that they went to.
    """
    transfer._unmarked += calls
    if transfer._unmarked < STEP:
        return
    transfer._unmarked = 0
    before, transfer._mark = transfer._mark, transfer.event()
    device.record(transfer._mark, stream)
    if before and transfer._issued is not None:  # else a submit would wait for the GPU
        with Uncaptured(device):
            device.driver.cuEventSynchronize(before)


def alone(device: Device, direction: str, size: Int64Array) -> int:
    """How many of these copies may go in no batch: small ones from host memory; all if the driver has no such call."""
    if device.driver.cuMemcpyBatchAsync is None:
        return size.size
    return int(np.count_nonzero(size < INLINED)) if direction == "load" else 0


def long_to_issue(device: Device, direction: str, held: Sequence[tuple[int, Int64Array]], most: int) -> bool:
    """Whether copies are to be issued by the lane's own thread.

    Args:
        device: the GPU.
        direction: of their plan.
        held: units, and bytes of every copy of one, of each part.
        most: copies in batches that are not.
    """
    copies = sum([units * size.size for units, size in held])
    if not SLOW_2D < copies <= most:
        return copies > most
    return sum([units * alone(device, direction, size) for units, size in held]) > SLOW_2D


def copy_all(device: Device, transfer: DeviceTransfer, made: Descriptors, first: int, last: int, stream: int) -> None:
    """Issue descriptors ``first`` to ``last``: in batches, or by a call each where they may not.

    Args:
        device: the GPU.
        transfer: that they are of.
        made: descriptors.
        first, last: which.
        stream: its handle.

    Raises:
        TransferError: with the first that the driver refuses, where it says which.
    """
    size = made.size[first:last]
    count = alone(device, transfer.plan.direction, size)
    if not count:
        _batched(device, made, np.arange(first, last), stream)
        return
    single = size < INLINED if count < size.size else np.ones(count, np.bool_)
    _batched(device, made, first + np.flatnonzero(~single), stream)
    rows = first + np.flatnonzero(single)
    while rows.size:
        step = STEP - transfer._unmarked
        some, rows = rows[:step], rows[step:]
        try:
            device.copy_each(made.dst[some], made.src[some], made.size[some], stream)
        except DriverError as error:
            refuse(error, made, some)
        pace(device, transfer, some.size, stream)


def _batched(device: Device, made: Descriptors, rows: Int64Array, stream: int) -> None:
    src, dst, size = (column[rows] for column in made)
    for at in range(0, rows.size, SLICE):
        first, count = 8 * at, min(SLICE, rows.size - at)
        try:
            device.copy_batch(dst.ctypes.data + first, src.ctypes.data + first, size.ctypes.data + first, count, stream)
        except DriverError as error:
            refuse(error, made, rows[at:])


def refuse(error: DriverError, columns: Sequence[Int64Array], rows: Sequence[int] | Int64Array) -> NoReturn:
    """Raise the error of a batch, with the descriptor where the driver names it.

    Args:
        error: what the call raised.
        columns: source, destination and bytes of all descriptors.
        rows: those that the batch begins with.
    """
    if error.at is None:
        raise error
    k = int(rows[error.at])
    src, dst, nbytes = (int(column[k]) for column in columns)
    named = f"{error}: descriptor {k} of {columns[0].size}, {nbytes} bytes from {src:#x} to {dst:#x}"
    raise TransferError(named) from error
