"""Transfers as part of CUDA graphs: captured once, replayed with other units."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvplan.cuda.device import Uncaptured
from kvplan.cuda.handles import current_stream, event_handle, stream_handle
from kvplan.errors import PathError
from kvplan.execute.gpu.device_transfer import DeviceTransfer
from kvplan.execute.gpu.lane import Fork
from kvplan.plan.plan import Plan

if TYPE_CHECKING:
    from kvplan.execute.gpu.backend import Runtime


class Graphs:
    """What one runtime has put into graphs, kept until it closes: a graph reads its slots at every replay."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._captured: list[DeviceTransfer] = []
        self._forks: list[int] = []

    def capturing(self, after: Any) -> int | None:
        """The stream being captured that a submit belongs to, or None: the one it names, else torch's current one."""
        device = self._runtime.device
        handle = None if after is None else stream_handle(after)
        if handle is None:
            handle = current_stream(device.ordinal) or None  # the default stream is never captured
        return handle if handle is not None and device.capturing(handle) else None

    def capture(self, transfer: DeviceTransfer, after: Any, stream: int) -> None:
        """Fork from the stream being captured, launch, and leave the end for ``wait`` to join.

        Raises:
            PathError: an ``after`` that is no part of the graph.
        """
        runtime = self._runtime
        device, behind = runtime.device, self._behind(after)
        with Uncaptured(device):
            fork = device.stream(urgent=True)
            self._forks.append(fork)
            self._captured.append(transfer)
            transfer._captured = True
            begin, end = transfer.event(), transfer.event()
            device.record(begin, stream)
            device.wait(fork, begin)
            if behind:
                device.wait(fork, behind)
            if transfer.plan.nbytes:
                runtime.kernel.prepare(transfer, transfer.plan, Fork(fork))()
            device.record(end, fork)
            transfer._begin, transfer._end = begin, end

    def _behind(self, after: Any) -> int:
        """The event that ``after`` stands for, besides the stream being captured; 0 for none."""
        if after is None or stream_handle(after) is not None:
            return 0
        if isinstance(after, DeviceTransfer):
            if not after._captured:
                raise PathError("after is a transfer outside the graph being captured; wait for it before the capture")
            return after._end
        event = event_handle(after)
        if event is None:
            kind = f"{type(after).__module__}.{type(after).__qualname__}"
            raise PathError(f"after is a {kind}, which cannot be captured into a CUDA graph; give a stream or an event")
        return event

    def replan(self, transfer: DeviceTransfer, plan: Plan) -> None:
        """Write other units into a captured transfer.

        Raises:
            PathError: the plan is of another direction or program, or has more units than were captured.
        """
        runtime = self._runtime
        if plan.direction != transfer.plan.direction:
            raise PathError(f"a {transfer.plan.direction!r} was captured, and this plan is a {plan.direction!r}")
        with runtime.device.current(), Uncaptured(runtime.device), runtime.lock:
            runtime.candidates.check(plan, "kernel")
            runtime.kernel.replan(transfer._launches, plan)
            transfer.plan = plan

    def close(self) -> None:
        """Give streams, events and slots back; the device is current."""
        for fork in self._forks:
            self._runtime.device.driver.cuStreamDestroy_v2(fork)
        for transfer in self._captured:
            transfer._give_back()
        self._forks.clear()
        self._captured.clear()
