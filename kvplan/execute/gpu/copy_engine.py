"""The copy-engine paths: batches of flat descriptors, and 2-D copies. They use no SM."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np

from kvplan.cuda.call_list import CallList, Segment, copy_rows
from kvplan.execute.gpu.device_transfer import DeviceTransfer
from kvplan.execute.gpu.path import Path, Streams
from kvplan.execute.gpu.resources import Resources
from kvplan.layout.strides import Int64Array
from kvplan.plan.descriptors import exploded, flat, strided
from kvplan.plan.loops_numpy import Descriptors
from kvplan.plan.plan import Plan

# Between GPUs, many copies of at least this size are faster on several streams. Host memory has one link.
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

    def write(self, transfer: DeviceTransfer, prepared: Slices, calls: CallList) -> None:
        """See :meth:`Path.write`."""
        made, edges, streams, events = prepared
        first, least = streams[0], batched_from(self._resources, transfer.plan.direction)
        if len(streams) > 1:
            calls.record(events[0], first)
        for stream in streams[1:]:
            calls.wait(stream, events[0])
        columns, most = np.stack(made), self._resources.limits.batch_copies
        rows = [
            copy_rows(columns, start, stop, streams[k % len(streams)], least, most)
            for k, (start, stop) in enumerate(pairwise(edges))
        ]
        calls.extend(Segment(np.concatenate(rows), columns))
        for stream, event in zip(streams[1:], events[1:], strict=True):
            calls.record(event, stream)
            calls.wait(first, event)


def _streams(plan: Plan, count: int) -> int:
    """Return the number of copy streams for a plan of ``count`` descriptors, if the policy names no number."""
    many = plan.direction == "device" and count >= PARALLEL_COPIES and plan.nbytes >= PARALLEL_NBYTES * count
    return PARALLEL_STREAMS if many else 1


class CopyEngine2DPath(Path):
    """The path ``"copy_engine_2d"``: one 2-D copy for each run and unit; flat descriptors for bytes without rows."""

    name = "copy_engine_2d"

    def prepare(
        self, transfer: DeviceTransfer, plan: Plan, lane: Streams
    ) -> tuple[Int64Array, Descriptors, int]:  # fmt: skip
        """Lower the plan into 2-D rows and flat descriptors; see :meth:`Path.prepare`."""
        rows = np.asarray(strided(plan.parts, self._resources.reach.seams(plan)))
        # The largest pitch is about 2 GiB. Layers of a large cache lie further apart.
        flat_rows = (rows[:, 3] == 1) | (rows[:, 4:6].max(axis=1, initial=0) > self._resources.device.max_pitch)
        transfer.count(int(rows[:, 3].sum()), 0)
        return rows[~flat_rows], exploded(rows[flat_rows]), lane.copy

    def write(
        self, transfer: DeviceTransfer, prepared: tuple[Int64Array, Descriptors, int], calls: CallList
    ) -> None:  # fmt: skip
        """See :meth:`Path.write`."""
        rows, rest, stream = prepared
        resources = self._resources
        least, most = batched_from(resources, transfer.plan.direction), resources.limits.batch_copies
        calls.boxes(parameters(rows), stream)
        before = calls.count
        calls.copies(np.stack(rest), stream, least=least, most=most)
        transfer.count(0, len(rows) + calls.count - before)


def parameters(rows: Int64Array) -> Int64Array:
    """Return the CUDA_MEMCPY2D of every row, as (n, 16) int64: the words of the structure.

    >>> parameters(np.array([[1, 2, 3, 4, 5, 6]])).tolist()
    [[0, 0, 4, 0, 1, 0, 5, 0, 0, 4, 0, 2, 0, 6, 3, 4]]
    """
    made = np.zeros((len(rows), 16), dtype=np.int64)
    made[:, (2, 9)] = UNIFIED
    made[:, (4, 11, 14, 15, 6, 13)] = rows
    return made


def batched_from(resources: Resources, direction: str) -> int:
    """Return the bytes of the smallest copy that may be in a batch: smaller ones from host memory get a call each."""
    if resources.device.driver.cuMemcpyBatchAsync is None:
        return 1 << 62
    return resources.limits.batch_nbytes if direction == "load" else 0


def alone(resources: Resources, direction: str, size: Int64Array) -> int:
    """Count copies that cannot be in a batch: small ones from host memory; all if the driver has no batch call."""
    return int(np.count_nonzero(size < batched_from(resources, direction)))
