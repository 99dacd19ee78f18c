"""The copy-engine paths: batches of flat descriptors, and 2-D copies. Neither takes an SM."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import numpy as np

from kvplan.cost.policy import Policy
from kvplan.cuda.device import INVALID_VALUE
from kvplan.execute.gpu.copies import SLICE, SLOW_2D, alone, copy_all, long_to_issue, pace
from kvplan.layout.strides import Int64Array
from kvplan.plan.descriptors import exploded, flat, strided, two_dimensional
from kvplan.plan.layers import split_layers
from kvplan.plan.loops_numpy import Descriptors
from kvplan.plan.plan import Plan
from kvplan.program.program import RunGroup

if TYPE_CHECKING:
    from kvplan.execute.gpu.backend import Runtime
    from kvplan.execute.gpu.device_transfer import DeviceTransfer
    from kvplan.execute.gpu.lane import Lane

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
        made = flat(plan.moving, self._runtime.seams(plan), None)
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
