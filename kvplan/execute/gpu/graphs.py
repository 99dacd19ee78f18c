"""Transfers in CUDA graphs: captured once, replayed with other units."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from kvplan.cuda.call_list import CallList
from kvplan.cuda.device import Uncaptured
from kvplan.cuda.handles import current_stream, event_handle, stream_handle
from kvplan.errors import KVPlanError, PathError, TransferError
from kvplan.execute.gpu.device_transfer import Callbacks, DeviceTransfer
from kvplan.execute.gpu.kernel_path import KernelPath
from kvplan.execute.gpu.path import Path
from kvplan.execute.gpu.resources import Resources
from kvplan.execute.transfer import TransferResult
from kvplan.plan.plan import Plan


class Fork:
    """The lane of a captured transfer: it has one stream, which no other transfer uses."""

    name, last = "capture", None

    def __init__(self, stream: int) -> None:
        self.copy = self.kernel = self.other = stream

    def sides(self, count: int) -> list[int]:
        """Return no further streams."""
        del count
        return []


class CapturedTransfer(DeviceTransfer):
    """A transfer that runs at every replay of its CUDA graph."""

    def __init__(self, plan: Plan, graphs: Graphs, callbacks: Callbacks, path: str) -> None:
        super().__init__(plan, graphs.resources, callbacks, path)
        self.capture()
        self._graphs = graphs

    def done(self) -> NoReturn:
        """Raise a :class:`TransferError`: only a replay can end."""
        raise _outside("done()")

    def synchronize(self, timeout: float | None = None) -> NoReturn:
        """Raise a :class:`TransferError`: only a replay can end."""
        del timeout
        raise _outside("synchronize()")

    def result(self) -> TransferResult:
        """Raise a :class:`TransferError`: a replay has no result."""
        self.synchronize()

    def cancel(self) -> NoReturn:
        """Raise a :class:`TransferError`: only a whole graph can be cancelled."""
        raise _outside("cancel()")

    def replan(self, plan: Plan) -> None:
        """See :meth:`kvplan.Transfer.replan`."""
        if not isinstance(plan, Plan):
            raise KVPlanError(f"plan is a {type(plan).__name__}; replan takes what CopyProgram.plan or join made")
        self._graphs.replan(self, plan)
        self.change_plan(plan)

    def __repr__(self) -> str:
        return f"Transfer({self.plan!r}, captured)"


class Graphs:
    """Captured transfers of one executor. They are kept until it closes: a graph reads their slots at every replay.

    Args:
        resources: resources of the executor.
        kernel: the path whose captured transfers can be replanned.
        check_open: raises if the executor is closed.
        check: raises if the kernel path cannot serve a plan.
    """

    def __init__(
        self, resources: Resources, kernel: KernelPath, check_open: Callable[[], None], check: Callable[[Plan], None]
    ) -> None:
        self.resources = resources
        self._kernel = kernel
        self._check_open = check_open
        self._check = check
        self._captured: list[DeviceTransfer] = []
        self._forks: list[int] = []

    def capturing(self, after: Any) -> int | None:
        """Return the stream of ``after``, otherwise torch's current stream, if it is being captured; else None."""
        device = self.resources.device
        handle = None if after is None else stream_handle(after)
        if handle is None:
            handle = current_stream(device.ordinal) or None  # the default stream is never captured
        return handle if handle is not None and device.capturing(handle) else None

    def capture(self, transfer: CapturedTransfer, path: Path, after: Any, stream: int) -> None:
        """Fork a stream from the stream being captured, and issue on it. ``Transfer.wait`` joins its end.

        Raises:
            PathError: ``after`` is not part of the graph.
        """
        device, behind = self.resources.device, self._behind(after)
        with Uncaptured(device):
            fork = device.stream(urgent=self.resources.kernels.urgent)
            self._forks.append(fork)
            self._captured.append(transfer)
            begin, end = transfer.event(), transfer.event()
            device.record(begin, stream)
            device.wait(fork, begin)
            if behind:
                device.wait(fork, behind)
            if transfer.plan.nbytes:
                calls = CallList()
                path.write(transfer, path.prepare(transfer, transfer.plan, Fork(fork)), calls)
                transfer.play(calls)
            device.record(end, fork)
            transfer.set_events(begin, end)

    def _behind(self, after: Any) -> int:
        """Return the event that ``after`` stands for; 0 if it is None or a stream."""
        if after is None or stream_handle(after) is not None:
            return 0
        if isinstance(after, DeviceTransfer):
            if after.captures is None:
                raise PathError("after is a transfer outside the graph being captured; wait for it before the capture")
            return after._end
        event = event_handle(after)
        if event is None:
            kind = f"{type(after).__module__}.{type(after).__qualname__}"
            raise PathError(f"after is a {kind}, which cannot be captured into a CUDA graph; give a stream or an event")
        return event

    def replan(self, transfer: CapturedTransfer, plan: Plan) -> None:
        """Write the units of another plan into a captured transfer.

        Raises:
            PathError: the plan has another direction or program, or more units than were captured.
        """
        self._check_open()
        if plan.direction != transfer.plan.direction:
            raise PathError(f"a {transfer.plan.direction!r} was captured, and this plan is a {plan.direction!r}")
        device = self.resources.device
        with device.current(), Uncaptured(device), self.resources.lock:
            self._check(plan)
            self._kernel.replan(transfer.captures or [], plan)

    def close(self) -> None:
        """Give streams, events and slots back. The device is current."""
        for fork in self._forks:
            self.resources.device.driver.cuStreamDestroy_v2(fork)
        for transfer in self._captured:
            transfer.give_back()
        self._forks.clear()
        self._captured.clear()


def _outside(call: str) -> TransferError:
    return TransferError(
        f"{call} of a transfer that was captured into a CUDA graph; it happens when the graph is replayed: "
        "synchronize the stream of the replay"
    )
