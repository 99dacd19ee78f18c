"""One GPU's executor: it chooses the path of a plan, issues the transfer on a lane, and ends when all have ended."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from kvplan.base.process import check_process, compiling
from kvplan.cost.model import Candidate
from kvplan.cost.policy import Policy, layer_edges
from kvplan.cost.profile import DeviceProfile
from kvplan.cuda.device import Device
from kvplan.cuda.handles import current_stream, stream_handle
from kvplan.errors import PathError, TransferError
from kvplan.execute.backend import CLOSED_ERROR
from kvplan.execute.gpu import row_loops
from kvplan.execute.gpu.gpu_transfer import GpuTransfer
from kvplan.execute.gpu.lane import Lane
from kvplan.execute.gpu.paths import CopyEngine2DPath, CopyEnginePath, KernelPath, Path
from kvplan.execute.gpu.resources import Resources, Shape
from kvplan.execute.gpu.selection import Selection
from kvplan.execute.gpu.staged import StagedPath
from kvplan.plan import loops
from kvplan.plan.layers import Edges, split_layers
from kvplan.plan.plan import Plan

# Every path of a GPU. To add a path, write a subclass of Path in paths.py, and list it here.
PATHS: tuple[Callable[[Resources], Path], ...] = (CopyEnginePath, CopyEngine2DPath, KernelPath, StagedPath)
DIRECTIONS = ("load", "store", "device")
# The driver refuses a batch of copies on a captured stream, and the capture then goes on without the copies.
CAPTURED = (
    "the stream is being captured into a CUDA graph, which would not copy at a replay; submit outside the capture"
)


# Between two looks at the transfers in flight. A look needs the interpreter, and an engine's thread that launches
# kernels then waits until it gets it back. Looks every 20 ms took 0.2 to 0.5 ms of a first token after 25 ms. Submits
# look, too, when a lane holds some transfers.
LOOK_SECONDS = 0.1
# Looks with no transfer in flight before the thread sleeps until it is woken. To wake it costs a submit time.
IDLE_LOOKS = 20
STOPPED_LOOK_SECONDS = 1e-3


class GpuBackend(Resources):
    """All parts of a GPU's :class:`kvplan.Executor`.

    Args:
        device, policy, lent: as of :class:`Resources`.
        profile: measured costs of the device; if None, the profile is looked up at the first use.

    Attributes:
        asleep: whether a submit must wake the thread.
        lanes: by direction and whether it is urgent.
    """

    def __init__(
        self, device: Device, policy: Policy, profile: DeviceProfile | None, lent: Callable[[], int | None]
    ) -> None:
        super().__init__(device, policy, lent)
        self.paths: dict[str, Path] = {path.name: path for path in (make(self) for make in PATHS)}
        self.selection = Selection(self, self.paths, profile)
        self.lanes = {
            (name, urgent): Lane(self, name, urgent=urgent) for name in DIRECTIONS for urgent in (False, True)
        }
        self.asleep = True
        self._preparing = 0

    # Submitting.

    def candidates_of(self, plan: Plan, *, by_layer: bool) -> list[Candidate]:
        """See :meth:`kvplan.Executor.candidates`."""
        self.check_open()
        with self.device.current():
            return self.selection.all(plan, self._edges(plan) if by_layer else ())

    def _edges(self, plan: Plan) -> Edges:
        edges = layer_edges(plan.nbytes, len(plan.layers))
        return edges if len(edges) > 2 else ()  # one group of layers is the whole transfer

    def submit(self, plan: Plan, after: Any, *, by_layer: bool = False, urgent: bool = False) -> GpuTransfer:
        """Issue a plan, or let another thread issue it if that takes long. Return the transfer at once."""
        device = self.device
        if not device.is_current():  # as in few submits
            with device.current():
                return self.submit(plan, after, by_layer=by_layer, urgent=urgent)
        check_process(self.generation)
        if self.closed:  # before anything is borrowed; again below, with the lock
            raise TransferError(CLOSED_ERROR)
        stream = None if after is None else stream_handle(after)
        if stream is None:
            stream = current_stream(device.ordinal)
        if stream and device.capturing(stream):  # the default stream, 0, is never captured
            raise PathError(CAPTURED)
        edges = self._edges(plan) if by_layer else ()
        path, predicted, pageable = self.selection.choose(plan, edges)
        lane = self.lanes[plan.direction, urgent]
        transfer = GpuTransfer(self, lane, path, plan, predicted, pageable=pageable)
        if edges:
            transfer.pieces = split_layers(plan, edges)
        if after is not None:
            lane.follow(transfer, after)
        self.take(transfer, lane.put)
        if self.asleep or lane.pending:
            self.bell.ring()
        return transfer

    def prepare(self, plan: Plan | None, *, by_layer: bool) -> None:
        """See :meth:`kvplan.Executor.prepare`."""
        with self.lock:
            self.check_open()
            self.start()
            self._preparing += 1  # close() waits for it, as for transfers
        try:
            with self.device.current():
                with compiling():  # and no other lock within
                    loops.load()
                    self.device.load_loops()
                    row_loops.load()
                if plan is None:
                    return
                edges = self._edges(plan) if by_layer else ()
                pieces = [piece for _, piece in split_layers(plan, edges)] if edges else [plan]
                for path in self.selection.offer(plan, edges).paths if plan.nbytes else ():
                    for piece in pieces:
                        path.warm_up(piece)
        finally:
            self._preparing -= 1
            self.bell.ring()

    def compile_kernel(self, shape: Shape) -> Any:
        """See :meth:`Resources.compile_kernel`."""
        compile_kernel = self.device.driver.compile_kernel
        if compile_kernel is None:
            from kvplan.execute.gpu import kernel  # only here, since it imports Triton

            compile_kernel = kernel.compile_kernel
        with compiling():
            return compile_kernel(shape, self.device.arch)

    # Ending.

    def look(self) -> int:
        """Issue what may begin, forget what has ended; return the number of transfers and calls that are left."""
        while sum(lane.advance() for lane in self.lanes.values()):
            pass
        with self.inside(), self.lock:
            for lane in self.lanes.values():
                lane.reap()
        return self.in_flight() + self._preparing

    def _flying(self) -> int:
        lines = [line.copy() for lane in self.lanes.values() for line in (lane.flying, lane.pending)]
        return len({transfer for line in lines for transfer in line if not transfer.over})

    # The thread.

    def _serve(self) -> None:
        idle = 0
        while not self.closed:
            self.asleep = idle >= IDLE_LOOKS
            if self.asleep and not self._flying():
                self.trim()
                self.bell.wait()
            else:
                self.bell.wait(LOOK_SECONDS)
            self.asleep = False
            idle = 0 if self.look() else idle + 1
        while self.look():
            self.bell.wait(STOPPED_LOOK_SECONDS)
        with suppress(TransferError):  # if the context is lost, nothing can be given back
            self.tear_down()
