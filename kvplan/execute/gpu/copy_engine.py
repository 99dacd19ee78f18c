"""The copy-engine paths: batches of flat descriptors, and 2-D copies. They use no SM."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple, NoReturn
from weakref import WeakKeyDictionary

import numpy as np

from kvplan.cuda.device import INVALID_VALUE, Device, DriverError
from kvplan.errors import TransferError
from kvplan.execute.gpu.device_transfer import DeviceTransfer
from kvplan.execute.gpu.path import Path, Streams
from kvplan.execute.gpu.resources import Limits, Resources
from kvplan.layout.strides import Int64Array
from kvplan.plan.descriptors import exploded, flat, strided, two_dimensional
from kvplan.plan.loops_numpy import Descriptors
from kvplan.plan.plan import Plan
from kvplan.program.program import RunGroup

# Many copies of at least this size are faster on several streams. For smaller copies the CPU is the limit.
PARALLEL_NBYTES, PARALLEL_COPIES, PARALLEL_STREAMS = 28 << 10, 64, 4
UNIFIED = 4  # CUmemorytype: the driver finds the kind of memory by the address


class Slices(NamedTuple):
    """Descriptors in slices. The streams take the slices in turn.

    Attributes:
        made: the descriptors.
        edges: index of the first descriptor of each slice, and the end of the last slice.
        streams: the streams; the first is the lane's copy stream.
        events: one event for each stream.
    """

    made: Descriptors
    edges: list[int]
    streams: list[int]
    events: list[int]


class CopyEnginePath(Path):
    """The path ``"copy_engine"``: cuMemcpyBatchAsync over the flat lowering; before driver 12.8, single copies."""

    name = "copy_engine"

    def slow(self, transfer: DeviceTransfer) -> bool:
        """See :meth:`Path.slow`."""
        return self.slow_for(transfer.plan)

    def slow_for(self, plan: Plan) -> bool:
        """Return whether it takes the CPU long to issue a plan."""
        resources = self._resources
        held = [(part.units.shape[1], part.group.packed[2]) for part in plan.parts]
        return long_to_issue(resources, plan.direction, held, resources.limits.slow_copies)

    def prepare(self, transfer: DeviceTransfer, plan: Plan, lane: Streams) -> Slices:
        """Lower the plan, and cut its descriptors into slices for one or more streams; see :meth:`Path.prepare`."""
        resources = self._resources
        made = flat(plan.moving, resources.reach.seams(plan), None)
        count = made.size.size
        wanted = min(resources.policy.streams or _streams(plan, count), count)
        slices = max(-(-count // resources.limits.batch_copies), wanted)
        edges = np.linspace(0, count, slices + 1).astype(int).tolist()
        streams = [lane.copy, *lane.sides(wanted - 1)]
        events = [transfer.event() for _ in streams]
        transfer.count(count, count if alone(resources, plan.direction, made.size) else slices)
        return Slices(made, edges, streams, events)

    def issue(self, transfer: DeviceTransfer, prepared: Slices) -> None:
        """See :meth:`Path.issue`."""
        made, edges, streams, events = prepared
        device, first = self._resources.device, streams[0]
        if len(streams) > 1:
            device.record(events[0], first)
        for stream in streams[1:]:
            device.wait(stream, events[0])
        for k, (start, stop) in enumerate(pairwise(edges)):
            copy_all(transfer, made, start, stop, streams[k % len(streams)])
        for stream, event in zip(streams[1:], events[1:], strict=True):
            device.record(event, stream)
            device.wait(first, event)


def _streams(plan: Plan, count: int) -> int:
    """Return the number of copy streams for a plan of ``count`` descriptors, if the policy names no number."""
    return PARALLEL_STREAMS if plan.nbytes >= PARALLEL_NBYTES * count and count >= PARALLEL_COPIES else 1


class CopyEngine2DPath(Path):
    """The path ``"copy_engine_2d"``: one 2-D copy for each run and unit; flat descriptors for bytes without rows."""

    name = "copy_engine_2d"

    def __init__(self, resources: Resources) -> None:
        super().__init__(resources)
        self._made: WeakKeyDictionary[RunGroup, tuple[int, Int64Array]] = WeakKeyDictionary()

    def slow(self, transfer: DeviceTransfer) -> bool:
        """See :meth:`Path.slow`. A transfer by layers cuts loops over layers, so it counts the calls of its pieces."""
        limits = self._resources.limits
        pieces = transfer.pieces()
        held = [(part.units.shape[1], *self._made_of(part.group)) for _, plan in pieces for part in plan.parts]
        if sum([units * calls for units, calls, _ in held]) > limits.slow_calls:
            return True
        rest = [(units, sizes) for units, _, sizes in held if sizes.size]
        return bool(rest) and long_to_issue(self._resources, transfer.plan.direction, rest, limits.slow_copies)

    def _made_of(self, group: RunGroup) -> tuple[int, Int64Array]:
        """Return the number of 2-D copies per unit, and the bytes of each flat descriptor. Seams are not counted."""
        made = self._made.get(group)
        if made is None:
            pieces = [piece for run in group.runs for piece in two_dimensional(run)]
            near = [bool(p.loops) and max(p.loops[0][1:]) <= self._resources.device.max_pitch for p in pieces]
            rest = [(p.nbytes, p.copies) for p, taken in zip(pieces, near, strict=True) if not taken]
            sizes = np.repeat([nbytes for nbytes, _ in rest], [count for _, count in rest]).astype(np.int64)
            made = self._made[group] = sum(near), sizes
        return made

    def prepare(
        self, transfer: DeviceTransfer, plan: Plan, lane: Streams
    ) -> tuple[Int64Array, Descriptors, int]:  # fmt: skip
        """Lower the plan into 2-D rows and flat descriptors; see :meth:`Path.prepare`."""
        rows = np.asarray(strided(plan.parts, self._resources.reach.seams(plan)))
        # The largest pitch is about 2 GiB. Layers of a large cache lie further apart.
        flat_rows = (rows[:, 3] == 1) | (rows[:, 4:6].max(axis=1, initial=0) > self._resources.device.max_pitch)
        transfer.count(int(rows[:, 3].sum()), 0)
        return rows[~flat_rows], exploded(rows[flat_rows]), lane.copy

    def issue(self, transfer: DeviceTransfer, prepared: tuple[Int64Array, Descriptors, int]) -> None:
        """See :meth:`Path.issue`."""
        rows, rest, stream = prepared
        resources, boxes = self._resources, parameters(rows)
        device, first, step = resources.device, boxes.ctypes.data, boxes.strides[0]
        for k in range(len(boxes)):
            code = device.copy_2d(first + k * step, stream)
            transfer.pace(1, stream)
            if code == INVALID_VALUE:  # rows of several allocations: nothing was issued, so each row gets a copy
                made = exploded(rows[k : k + 1])
                transfer.count(0, made.size.size - 1)
                copy_all(transfer, made, 0, made.size.size, stream)
            elif code:
                src, dst, width, height, *_ = rows[k].tolist()
                what = f"2-D copy {k} of {len(boxes)}, {height} rows of {width} bytes from {src:#x} to {dst:#x}"
                device.driver.check("cuMemcpy2DAsync", code, what)
        count = rest.size.size
        copy_all(transfer, rest, 0, count, stream)
        single = alone(resources, transfer.plan.direction, rest.size)
        transfer.count(0, len(boxes) + (count if single else -(-count // resources.limits.batch_copies)))


def parameters(rows: Int64Array) -> Int64Array:
    """Return the CUDA_MEMCPY2D of every row, as (n, 16) int64: the words of the structure.

    >>> parameters(np.array([[1, 2, 3, 4, 5, 6]])).tolist()
    [[0, 0, 4, 0, 1, 0, 5, 0, 0, 4, 0, 2, 0, 6, 3, 4]]
    """
    made = np.zeros((len(rows), 16), dtype=np.int64)
    made[:, (2, 9)] = UNIFIED
    made[:, (4, 11, 14, 15, 6, 13)] = rows
    return made


def alone(resources: Resources, direction: str, size: Int64Array) -> int:
    """Count copies that cannot be in a batch: small ones from host memory; all if the driver has no batch call."""
    if resources.device.driver.cuMemcpyBatchAsync is None:
        return size.size
    return int(np.count_nonzero(size < resources.limits.batch_nbytes)) if direction == "load" else 0


def long_to_issue(
    resources: Resources, direction: str, held: Sequence[tuple[int, Int64Array]], most: int
) -> bool:  # fmt: skip
    """Return whether the lane's own thread should issue these copies, because they take the CPU long.

    Args:
        resources: resources of the executor.
        direction: direction of their plan.
        held: for each plan part, its number of units, and the bytes of every copy of one unit.
        most: largest number of copies in batches that does not take long.
    """
    copies, few = sum([units * size.size for units, size in held]), resources.limits.slow_calls
    if not few < copies <= most:
        return copies > most
    return sum([units * alone(resources, direction, size) for units, size in held]) > few


def copy_all(transfer: DeviceTransfer, made: Descriptors, first: int, last: int, stream: int) -> None:
    """Issue descriptors ``first`` to ``last - 1``: in batches, and with one call each if they cannot be in a batch.

    Args:
        transfer: the transfer.
        made: its descriptors.
        first, last: index of the first descriptor, and the index after the last.
        stream: handle of the stream.

    Raises:
        TransferError: the driver refuses a descriptor; the text names the descriptor if the driver does.
    """
    size, resources = made.size[first:last], transfer.resources
    device, limits = resources.device, resources.limits
    count = alone(resources, transfer.plan.direction, size)
    if not count:
        _batched(device, limits, made, np.arange(first, last), stream)
        return
    single = size < limits.batch_nbytes if count < size.size else np.ones(count, np.bool_)
    _batched(device, limits, made, first + np.flatnonzero(~single), stream)
    rows = first + np.flatnonzero(single)
    while rows.size:
        step = transfer.room
        some, rows = rows[:step], rows[step:]
        try:
            device.copy_each(made.dst[some], made.src[some], made.size[some], stream)
        except DriverError as error:
            refuse(error, made, some)
        transfer.pace(some.size, stream)


def _batched(device: Device, limits: Limits, made: Descriptors, rows: Int64Array, stream: int) -> None:
    (src, dst, size), most = (column[rows] for column in made), limits.batch_copies
    for at in range(0, rows.size, most):
        first, count = 8 * at, min(most, rows.size - at)
        try:
            device.copy_batch(dst.ctypes.data + first, src.ctypes.data + first, size.ctypes.data + first, count, stream)
        except DriverError as error:
            refuse(error, made, rows[at:])


def refuse(error: DriverError, columns: Sequence[Int64Array], rows: Sequence[int] | Int64Array) -> NoReturn:
    """Raise the error of a batch. Its text describes the descriptor that the driver names.

    Args:
        error: the error of the call.
        columns: source, destination and bytes of all descriptors.
        rows: indices of the batch's descriptors.
    """
    if error.at is None:
        raise error
    k = int(rows[error.at])
    src, dst, nbytes = (int(column[k]) for column in columns)
    named = f"{error}: descriptor {k} of {columns[0].size}, {nbytes} bytes from {src:#x} to {dst:#x}"
    raise TransferError(named) from error
