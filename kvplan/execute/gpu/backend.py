"""One GPU's executor: builds what it consists of, chooses a plan's path, and hands the transfer to a lane."""

from __future__ import annotations

from functools import partial
from threading import get_ident
from typing import Any

from kvplan.base.process import check_process, compiles, generation
from kvplan.base.threads import acting
from kvplan.cost.model import Candidate
from kvplan.cost.policy import Policy
from kvplan.cost.profile import DeviceProfile
from kvplan.cuda.device import Device, Uncaptured
from kvplan.errors import PathError, TransferError
from kvplan.execute.gpu.copy_engine import CopyEngine2DPath, CopyEnginePath
from kvplan.execute.gpu.device_transfer import Callbacks, DeviceTransfer
from kvplan.execute.gpu.graphs import CapturedTransfer, Graphs
from kvplan.execute.gpu.kernel_path import KernelPath
from kvplan.execute.gpu.lane import Lane
from kvplan.execute.gpu.mixed import MixedPath
from kvplan.execute.gpu.path import Path
from kvplan.execute.gpu.reaper import Alarm, Duties, Reaper
from kvplan.execute.gpu.resources import DEFAULT_LIMITS, Limits, resources_of
from kvplan.execute.gpu.selection import Selection
from kvplan.execute.gpu.staged import StagedPath
from kvplan.execute.gpu.waits import waits_of
from kvplan.execute.gpu.warmup import warm_up
from kvplan.execute.transfer import CLOSED_ERROR
from kvplan.plan.plan import Plan

# Every path of a GPU. A new one is a class that keeps the Protocol of path.py, and a name here.
# `Policy(path=...)` takes the names that stand in cost/policy.py.
PATHS: tuple[type[Path], ...] = (CopyEnginePath, CopyEngine2DPath, KernelPath, StagedPath, MixedPath)
DIRECTION_LANES = ("load", "store")


class GpuBackend:
    """All parts of a GPU's :class:`kvplan.Executor`.

    Its reaper's thread keeps it alive until it is stopped and all that was submitted has ended.

    Args:
        device: the GPU.
        policy: what the caller asked for.
        profile: what the device's paths cost; None finds it when first asked for.
        limits: sizes and counts at which paths change what they do.
        paths: the classes of all paths.

    Attributes:
        resources: what all parts share.
        paths: by their names.
        lanes: by their names: one for each direction, and one for its urgent transfers.
    """

    def __init__(
        self,
        device: Device,
        policy: Policy,
        profile: DeviceProfile | None = None,
        limits: Limits = DEFAULT_LIMITS,
        paths: tuple[type[Path], ...] = PATHS,
    ) -> None:
        self.resources = resources = resources_of(device, policy, limits)
        self.tally = resources.tally
        self.closed = False
        self._owned = resources.lock._is_owned  # whether the calling thread holds the lock
        self._preparing: dict[object, int] = {}  # the threads of calls of prepare that have not returned
        self.paths = {made.name: made for made in (path(resources) for path in paths)}
        self.selection = Selection(resources, self.paths, profile)
        self.callbacks = Callbacks(self._reap, self.selection.expected)
        self.graphs = Graphs(
            resources, KernelPath(resources), self.check_open, partial(self.selection.check, KernelPath.name)
        )
        alarm = Alarm()
        duties = Duties(
            self.reap, self.tally.settle, self.stop, self._stop_lanes, self._ended, self._tear_down, self._left
        )
        self.reaper = Reaper(duties, alarm, resources.inside, limits.exit_seconds)
        self.lanes: dict[str, Lane] = {}
        for name in DIRECTION_LANES:
            self.lanes[name] = Lane(resources, name, alarm, self._reap)
        for name in DIRECTION_LANES:
            self.lanes[f"urgent {name}"] = Lane(resources, f"urgent-{name}", alarm, self._reap, self.lanes[name])
        resources.wakes.extend(lane.wake for lane in self.lanes.values())
        load, store, urgent_load, urgent_store = self.lanes.values()
        # For each urgency, and for loads and stores: the lane of a transfer, and the direction's other lane.
        self._lanes_of = {
            (False, False): (load, urgent_load), (True, False): (urgent_load, load),
            (False, True): (store, urgent_store), (True, True): (urgent_store, store),
        }  # fmt: skip

    def own(self, executor: object) -> None:
        """End when this object is gone, also where its finalizer is broken off."""
        self.reaper.own(executor)

    def start(self) -> None:
        """Start its reaper.

        Raises:
            TransferError: no thread can be started for it.
        """
        self.reaper.thread.start()

    # Submitting.

    def check_open(self) -> None:
        """Transfers can be submitted.

        Raises:
            TransferError: it is closed, or belongs to another process.
        """
        check_process(self.resources.generation)
        if self.closed:
            raise TransferError(CLOSED_ERROR)

    def candidates_of(self, plan: Plan) -> list[Candidate]:
        """See :meth:`kvplan.Executor.candidates`."""
        self.check_open()
        with self.resources.device.current():
            return self.selection.all(plan)

    def prepare(self, plan: Plan | None, *, by_layer: bool) -> None:
        """See :meth:`kvplan.Executor.prepare`."""
        check_process(self.resources.generation)  # before the lock: a fork's child may lack the thread that holds it
        me = object()
        try:
            # A close must not tear down what is being made: it waits for this, as it does for transfers.
            with self.lanes["load"].lock:  # which the end takes, too
                self.check_open()
                self._preparing[me] = get_ident()
            groups = self.resources.limits.layer_groups if by_layer else 1
            warm_up(self.resources.device, plan, self.selection.likely, groups)
        finally:
            self._preparing.pop(me, None)

    def submit(self, plan: Plan, after: Any, *, by_layer: bool, urgent: bool = False) -> DeviceTransfer:
        """Issue a plan, or let the lane's own thread do so where that takes long; returns at once."""
        resources = self.resources
        with resources.device.current():
            capturing = self.graphs.capturing(after)
            path, predicted, pageable = self.selection.choose(plan, capturing=capturing is not None)
            if capturing is not None:
                return self._capture(plan, path, after, capturing, urgent=urgent)
            groups = 0
            if by_layer:
                limits = resources.limits
                groups = min(limits.layer_groups, max(plan.nbytes // limits.layer_group_nbytes, 1))
            transfer = DeviceTransfer(plan, resources, self.callbacks, path.name, predicted, groups)
            lane, other = self._lanes_of[urgent, plan.direction == "store"]
            # A signal's handler or a finalizer may submit within another call of the same thread. Then this call
            # neither looks at what that call has half done nor waits.
            if self._owned() or lane.owned() or (acting and get_ident() in acting):
                self.check_open()
                self._put(transfer, path, lane, other, after, late=True)
                return transfer
            with lane.lock:
                self.check_open()
                self._put(transfer, path, lane, other, after, late=pageable or path.slow(transfer))
        return transfer

    def _put(
        self, transfer: DeviceTransfer, path: Path, lane: Lane, other: Lane, after: Any, *, late: bool
    ) -> None:  # fmt: skip
        """Issue a transfer, or queue it for the lane's own thread."""
        try:
            waits = waits_of(after, transfer)
            behind = other.conflicting(transfer.plan)
            late = late or waits is None or lane.busy or (lane.calls > self.resources.limits.lane_calls and lane.full())
            late = late or (after is not None and isinstance(after, DeviceTransfer) and after.queued)
            late = late or (bool(behind) and any(one.queued for one in behind))
            if late:
                lane.issue_later(transfer, path, after, waits, behind)
                return
            lane.issuing = transfer
            try:
                lane.issue(transfer, path, waits or [], behind)
            finally:
                lane.issuing = None
        except BaseException as error:
            if transfer._issued is None or not (transfer._begun or transfer in lane.pending.entries()):
                transfer.abandon(error)
            raise

    def _capture(self, plan: Plan, path: Path, after: Any, stream: int, *, urgent: bool) -> DeviceTransfer:
        """Make a plan part of the graph that a stream is captured into."""
        if urgent:
            raise PathError("a transfer of high priority cannot be captured into a CUDA graph; a graph has no order")
        lane, _ = self._lanes_of[False, plan.direction == "store"]
        transfer = CapturedTransfer(plan, self.graphs, self.callbacks, path.name)
        with lane.lock:
            self.check_open()
            self.graphs.capture(transfer, path, after, stream)
        return transfer

    def in_flight(self) -> int:
        """Number of transfers that are not known to have ended."""
        if self.resources.generation != generation():  # no thread holds this process's share of the lock
            return 0
        some: dict[DeviceTransfer, None] = {}
        for lane in self.lanes.values():
            some |= lane.entries()
        return sum(not one._over for one in some)

    # The ends.

    def reap(self) -> int:
        """Take back what ended transfers hold; returns how many transfers are left."""
        device = self.resources.device
        with device.current(), Uncaptured(device):
            return self._reap()

    def _reap(self) -> int:
        with self.resources.lock:
            left = 0
            for lane in self.lanes.values():
                if lane.flying or lane.last is not None:
                    left += lane.reap()
            return left

    def stop(self) -> None:
        """Take no more transfers; submitted ones go on. Returns at once."""
        if self.resources.generation == generation():
            self.closed = True
            self.reaper.stop()

    def close(self) -> None:
        """Stop, and wait until all has ended and everything is given back."""
        self.stop()
        # Code that a lane's thread runs for an `after=` cannot wait for the lane's own end. Nor can a signal's handler
        # or a finalizer wait for the call that it interrupts.
        me = get_ident()
        here = me in self.resources.inside or me in self._preparing.values() or me in acting or compiles()
        here = here or self._owned() or any(lane.owned() for lane in self.lanes.values())
        if self.resources.generation == generation() and not here:
            self.reaper.thread.join()

    def _stop_lanes(self) -> None:
        """Let the lanes end behind what they have: by then, each submit that found it open is issued or queued."""
        for name in DIRECTION_LANES:
            with self.lanes[name].lock:
                pass
        for lane in self.lanes.values():
            lane.stop()

    def _ended(self) -> bool:
        """Whether all lanes have ended, and what they issued, and no call of prepare is left."""
        lanes = self.lanes.values()
        return all(lane.thread.join(0) for lane in lanes) and not self.reap() and not self._preparing

    def _left(self) -> tuple[int, int]:
        """Transfers, and calls of prepare, that have not ended."""
        return sum(len(lane.flying) + lane.queued for lane in self.lanes.values()), len(self._preparing)

    def _tear_down(self) -> None:
        """Give everything back to the driver; nothing is in flight."""
        resources = self.resources
        device, cu = resources.device, resources.device.driver
        with device.current(), Uncaptured(device):
            self.graphs.close()
            for path in self.paths.values():
                path.close()
            resources.tables.close()
            for lane in self.lanes.values():
                for stream in lane.streams:
                    cu.cuStreamDestroy_v2(stream)
            for event in resources.events:
                cu.cuEventDestroy_v2(event)
            resources.events.clear()
            resources.slots.close()
            resources.memory.close()
