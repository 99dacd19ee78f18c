"""The mixed path: the copy engine moves the large runs of a plan, and the kernel its small runs, at the same time.

For the copy engine every small copy has a cost; SMs reach less of the link's bandwidth than the copy engine. Hybrid
caches have small and large runs: pages of attention, and states of about a megabyte.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from kvplan.cost.model import MIXED
from kvplan.cuda.call_list import CallList
from kvplan.execute.gpu.copy_engine import CopyEnginePath
from kvplan.execute.gpu.device_transfer import DeviceTransfer
from kvplan.execute.gpu.kernel_path import KernelPath
from kvplan.execute.gpu.path import Path, Refusal, Sides, Streams
from kvplan.execute.gpu.resources import Resources
from kvplan.plan.halves import halves_of
from kvplan.plan.plan import Plan


class Both(NamedTuple):
    """Both halves of a plan, prepared.

    Attributes:
        by_engine, by_kernel: results of ``prepare`` of the copy engine's and the kernel's path; None for no such half.
        copy, kernel: the streams.
        begun, copied: the event before the copies, and the event behind them.
    """

    by_engine: Any
    by_kernel: Any
    copy: int
    kernel: int
    begun: int
    copied: int


class MixedPath(Path):
    """The mixed path: copy engine and kernel at the same time, for different runs."""

    name = MIXED
    in_order = False  # the copies of the next transfer would not wait for the kernel of this transfer

    def __init__(self, resources: Resources) -> None:
        super().__init__(resources)
        self._engine, self._kernel = CopyEnginePath(resources), KernelPath(resources)

    def refuse(self, plan: Plan, sides: Sides) -> Refusal | None:
        """See :meth:`Path.refuse`."""
        return self._engine.refuse(plan, sides) or self._kernel.refuse(plan, sides)

    def streams(self, lane: Streams, direction: str) -> tuple[int, int]:
        """See :meth:`Path.streams`."""
        del direction
        return lane.copy, lane.kernel

    def warm_up(self, plan: Plan) -> None:
        """Compile and upload the kernel's half."""
        small = halves_of(plan)[1]
        if small is not None:
            self._kernel.warm_up(small)

    def prepare(self, transfer: DeviceTransfer, plan: Plan, lane: Streams) -> Both:
        """Prepare both halves; see :meth:`Path.prepare`."""
        large, small = halves_of(plan)
        by_engine = self._engine.prepare(transfer, large, lane) if large else None
        by_kernel = self._kernel.prepare(transfer, small, lane) if small else None
        return Both(by_engine, by_kernel, lane.copy, lane.kernel, transfer.event(), transfer.event())

    def write(self, transfer: DeviceTransfer, prepared: Both, calls: CallList) -> None:
        """Write both halves down, each for its own stream, and join them; see :meth:`Path.write`."""
        by_engine, by_kernel, copy, kernel, begun, copied = prepared
        calls.record(begun, copy)
        calls.wait(kernel, begun)
        if by_kernel is not None:  # before the copies, since a call for a batch of copies takes long
            self._kernel.write(transfer, by_kernel, calls)
        if by_engine is not None:
            self._engine.write(transfer, by_engine, calls)
            calls.record(copied, copy)
            calls.wait(kernel, copied)
