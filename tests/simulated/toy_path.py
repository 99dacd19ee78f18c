"""A path in 40 lines: what a new file in `kvplan/execute/gpu` needs, and no more."""

from __future__ import annotations

from kvplan.cuda.call_list import CallList
from kvplan.errors import HostMemoryError
from kvplan.execute.gpu.device_transfer import DeviceTransfer
from kvplan.execute.gpu.path import Path, Refusal, Sides, Streams
from kvplan.plan.descriptors import flat
from kvplan.plan.loops_numpy import Descriptors
from kvplan.plan.plan import Plan


class ToyPath(Path):
    """A call of the driver for each descriptor, on the lane's stream for copies."""

    name = "toy"

    def refuse(self, plan: Plan, sides: Sides) -> Refusal | None:
        if sides.pageable:
            return HostMemoryError, f"path 'toy' reaches pinned memory only: {sides.pageable}; pin it"
        return None

    def prepare(self, transfer: DeviceTransfer, plan: Plan, lane: Streams) -> tuple[Descriptors, int]:
        made = flat(plan.moving, self._resources.reach.seams(plan), None)
        transfer.count(made.size.size, made.size.size)
        return made, lane.copy

    def write(self, transfer: DeviceTransfer, prepared: tuple[Descriptors, int], calls: CallList) -> None:
        made, stream = prepared
        for dst, src, nbytes in zip(*(column.tolist() for column in (made.dst, made.src, made.size)), strict=True):
            calls.copy(dst, src, nbytes, stream)
