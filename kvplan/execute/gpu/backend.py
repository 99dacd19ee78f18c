"""One GPU's executor: it makes its parts, chooses the path of a plan, and issues the transfer on a lane."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from threading import get_ident
from typing import Any, TypeVar

from kvplan.base.process import check_process, generation
from kvplan.base.threads import held_here
from kvplan.cost.model import Candidate
from kvplan.cost.policy import Policy, cuttings
from kvplan.cost.profile import DeviceProfile
from kvplan.cuda.device import Device, Uncaptured
from kvplan.cuda.handles import current_stream, stream_handle
from kvplan.errors import PathError, TransferError
from kvplan.execute.gpu.copy_engine import CopyEngine2DPath, CopyEnginePath
from kvplan.execute.gpu.device_transfer import Callbacks, DeviceTransfer
from kvplan.execute.gpu.kernel_path import KernelPath
from kvplan.execute.gpu.lanes.lane import Lane
from kvplan.execute.gpu.launches.ahead import Ahead, Rooms
from kvplan.execute.gpu.launches.resident import Resident
from kvplan.execute.gpu.path import Path
from kvplan.execute.gpu.reaper import Alarm, Duties, Reaper
from kvplan.execute.gpu.resources import DEFAULT_LIMITS, Limits, resources_of
from kvplan.execute.gpu.selection import Selection
from kvplan.execute.gpu.staged import StagedPath
from kvplan.execute.gpu.waits import waits_of
from kvplan.execute.gpu.warmup import warm_up
from kvplan.execute.transfer import CLOSED_ERROR
from kvplan.layout.strides import Int64Array
from kvplan.plan.layers import Cutting
from kvplan.plan.plan import Plan

# Every path of a GPU. To add a path, write a class that implements the Protocol of path.py, and list it here.
PATHS: tuple[type[Path], ...] = (CopyEnginePath, CopyEngine2DPath, KernelPath, StagedPath)
Made = TypeVar("Made")
DIRECTION_LANES = ("load", "store", "device")
WITHIN = (
    "this submit came within another call of the same executor, in a signal handler or a finalizer; submit after that "
    "call has returned"
)
# The driver refuses a batch of copies on a captured stream, and the capture then goes on without the copies.
CAPTURED = (
    "the stream is being captured into a CUDA graph, which would not copy at a replay; submit outside the capture"
)


class GpuBackend:
    """All parts of a GPU's :class:`kvplan.Executor`.

    The thread of its reaper keeps it alive until it is stopped and all submitted transfers have ended.

    Args:
        device: the GPU.
        policy: the caller's policy.
        profile: measured costs of the device; if None, the profile is looked up at the first use.
        limits: sizes and counts at which paths change what they do.
        paths: the classes of all paths.
        lent: returns the handle of the caller's stream for all kernels, or None; called at the first kernel of a lane.

    Attributes:
        resources: data, memory and events that all parts share.
        paths: the paths, by name.
        lanes: the lanes, by name: for each direction, one for normal and one for urgent transfers.
    """

    def __init__(
        self,
        device: Device,
        policy: Policy,
        profile: DeviceProfile | None = None,
        limits: Limits = DEFAULT_LIMITS,
        paths: tuple[type[Path], ...] = PATHS,
        lent: Callable[[], int | None] = lambda: None,
    ) -> None:
        self.resources = resources = resources_of(device, policy, limits, lent)
        self.tally = resources.tally
        self.closed = False
        self._owned = held_here(resources.lock)
        self._preparing: dict[object, int] = {}  # the threads of calls of prepare that have not returned
        self.paths = {made.name: made for made in (path(resources) for path in paths)}
        self.rooms = Rooms(resources, limits.near_rows, self._reap)
        self.selection = Selection(resources, self.paths, profile)
        self.callbacks = Callbacks(self._reap, self.selection.expected)
        alarm = Alarm()
        duties = Duties(
            self.reap, self.tally.settle, self.stop, self._stop_lanes, self._ended, self._tear_down, self._left
        )
        self.reaper = Reaper(duties, alarm, resources.inside, limits.exit_seconds)
        self.lanes: dict[str, Lane] = {}
        for name in DIRECTION_LANES:
            self.lanes[name] = Lane(resources, name, alarm, self._reap, urgent=False)
        for name in DIRECTION_LANES:
            self.lanes[f"urgent {name}"] = Lane(resources, f"urgent-{name}", alarm, self._reap, urgent=True)
        resources.wakes.extend(lane.wake for lane in self.lanes.values())

    def start(self) -> None:
        """Start the reaper.

        Raises:
            TransferError: the thread cannot be started.
        """
        self.reaper.thread.start()

    # Submitting.

    def check_open(self) -> None:
        """Check that transfers can be submitted.

        Raises:
            TransferError: the executor is closed, or belongs to another process.
        """
        check_process(self.resources.generation)
        if self.closed:
            raise TransferError(CLOSED_ERROR)

    def candidates_of(self, plan: Plan, *, by_layer: bool, beside_seconds: float | None) -> list[Candidate]:
        """See :meth:`kvplan.Executor.candidates`."""
        self.check_open()
        with self.resources.device.current():
            groups = self.selection.groups(plan, by_layer=by_layer, beside_seconds=beside_seconds)
            return self.selection.all(plan, groups)

    def prepare(self, plan: Plan | None, *, by_layer: bool) -> None:
        """See :meth:`kvplan.Executor.prepare`."""
        cuts = cuttings(self.resources.limits.layer_groups) if by_layer else ()
        self._while_open(partial(self._prepare, plan, cuts))

    def _prepare(self, plan: Plan | None, cuts: Sequence[Cutting]) -> None:
        if cuts and plan is not None:  # look the profile up now, not within a submit that tells the compute beside it
            with self.resources.device.current():
                self.selection.groups(plan, by_layer=True, beside_seconds=1.0)
        warm_up(self.resources.device, plan, partial(self.selection.likely, cuts=cuts), cuts)

    def _while_open(self, call: Callable[[], Made]) -> Made:
        """Make a call for which close() waits, as it does for transfers, so that it frees nothing that is in use."""
        check_process(self.resources.generation)  # before the lock: in a forked child, no thread may ever release it
        me = object()
        try:
            with self.lanes["load"].lock:  # close() takes this lock, too
                self.check_open()
                self._preparing[me] = get_ident()
            return call()
        finally:
            self._preparing.pop(me, None)

    def room(self, count: int) -> Ahead | None:
        """Return room for the units of a plan, to upload them before the submit; None if nothing is gained by it.

        Raises:
            TransferError: the executor is closed, or a driver call failed.
        """
        if count <= self.resources.limits.near_rows:
            return None
        return self._while_open(partial(self._room, count))

    def _room(self, count: int) -> Ahead | None:
        with self.resources.device.current():
            return self.rooms.room(count)

    def upload(self, ahead: Ahead, plan: Plan) -> None:
        """Upload the units that were written into a room, and let the plan of these units keep the room.

        The plan can be submitted any number of times, to this executor or another, and moved by any path.

        Raises:
            KVPlanError: it cannot be uploaded; the plan can still be submitted.
        """
        vars(plan)["ahead"] = ahead  # the plan's units are the room's
        self._while_open(partial(self._upload, ahead, plan))

    def _upload(self, ahead: Ahead, plan: Plan) -> None:
        with self.resources.device.current():
            choice = self.selection.choose(plan)
            choice.path.upload(ahead, plan)
            ahead.choice = None if ahead.table is None else choice

    def keep(self, plan: Plan, addresses: Int64Array, offsets: Int64Array, *, gathers: bool) -> Resident | None:
        """Upload the addresses of many units, for plans that copy some of them to or from slots.

        Args:
            plan: the plan of some of the units. It has one part.
            addresses, offsets, gathers: see :meth:`kvplan.execute.gpu.path.Path.keep`.

        Returns:
            The units, or None: the path that the executor takes reads them otherwise, or there is no room.

        Raises:
            KVPlanError: they cannot be uploaded.
        """
        return self._while_open(partial(self._keep, plan, addresses, offsets, gathers=gathers))

    def _keep(self, plan: Plan, addresses: Int64Array, offsets: Int64Array, *, gathers: bool) -> Resident | None:
        with self.resources.device.current():
            choice = self.selection.choose(plan)
            room = -(-(addresses.size + offsets.size) // 2)
            ahead = self.rooms.room(room) if choice.path.keeps(plan) else None
            if ahead is None:
                return None
            kept: Resident | None = choice.path.keep(ahead, plan, addresses, offsets, gathers=gathers)
            ahead.choice = choice
            return kept

    def submit(
        self, plan: Plan, after: Any, *, by_layer: bool, urgent: bool = False, beside_seconds: float | None = None
    ) -> DeviceTransfer:
        """Issue a plan, or let another thread issue it if that takes long. Return the transfer at once."""
        device = self.resources.device
        if device.is_current():  # as in most submits; then there is nothing to restore
            return self._submit(plan, after, by_layer, urgent, beside_seconds)
        with device.current():
            return self._submit(plan, after, by_layer, urgent, beside_seconds)

    def _submit(
        self, plan: Plan, after: Any, by_layer: bool, urgent: bool, beside_seconds: float | None
    ) -> DeviceTransfer:
        """Submit while the device is current."""
        resources = self.resources
        stream = None if after is None else stream_handle(after)
        if stream is None:
            stream = current_stream(resources.device.ordinal)
        if stream and resources.device.capturing(stream):  # the default stream, 0, is never captured
            raise PathError(CAPTURED)
        groups = None
        if by_layer:
            groups = self.selection.groups(plan, by_layer=True, beside_seconds=beside_seconds)
        ahead = plan.ahead
        if ahead is not None and not groups and ahead.choice is not None and ahead.of(resources):
            path, predicted, pageable = ahead.choice
        else:
            path, predicted, pageable = self.selection.choose(plan, groups=groups)
        lane = self.lanes[f"urgent {plan.direction}" if urgent else plan.direction]
        if self._owned() or lane.owned():
            raise TransferError(WITHIN)
        transfer = DeviceTransfer(plan, resources, self.callbacks, path.name, predicted, groups)
        with lane.lock:
            self.check_open()
            self._put(transfer, path, lane, after, blocking=pageable)
        return transfer

    def _put(self, transfer: DeviceTransfer, path: Path, lane: Lane, after: Any, *, blocking: bool) -> None:
        """Issue a transfer; or queue it for the lane's own thread, if the CPU must wait before it begins."""
        try:
            waits = [] if after is None else waits_of(after, transfer)
            late = waits is None or lane.busy
            if after is not None and isinstance(after, DeviceTransfer):
                # The lane's thread waits on the CPU for the calls of another executor's transfer.
                foreign = after.resources is not self.resources
                late = late or after.queued or (foreign and after.unplayed)
            if late:
                lane.issue_later(transfer, path, after, waits, blocking=blocking)
                return
            lane.issuing = transfer
            try:
                lane.issue(transfer, path, waits or [], blocking=blocking)
            finally:
                lane.issuing = None
        except BaseException as error:
            if transfer._issued is None or not (transfer._begun or transfer in lane.pending.copy()):
                transfer.abandon(error)
            raise

    def in_flight(self) -> int:
        """Return the number of transfers that are not known to have ended."""
        if self.resources.generation != generation():  # a forked child, which has no transfers
            return 0
        some: dict[DeviceTransfer, None] = {}
        for lane in self.lanes.values():
            some |= lane.entries()
        return sum(not one._over for one in some)

    # Ending.

    def reap(self) -> int:
        """Take back the loans of ended transfers, and return how many transfers are left."""
        device = self.resources.device
        with device.current():
            return self._reap()

    def _reap(self) -> int:
        """Do as :meth:`reap`, while the device is current."""
        with Uncaptured(self.resources.device), self.resources.lock:
            left = 0
            for lane in self.lanes.values():
                if lane.flying or lane.last is not None:
                    left += lane.reap()
            return left

    def stop(self) -> None:
        """Accept no more transfers, and return at once. Submitted transfers continue."""
        if self.resources.generation == generation():
            self.closed = True
            self.reaper.stop()

    def close(self) -> None:
        """Stop, and wait until all transfers have ended and all resources are given back."""
        self.stop()
        # Code that a lane's thread runs for an `after=` cannot wait for the end of that thread. A signal handler or a
        # finalizer cannot wait for the call that it interrupts. In these cases, close() does not wait.
        me = get_ident()
        here = me in self.resources.inside or me in self._preparing.values()
        here = here or self._owned() or any(lane.owned() for lane in self.lanes.values())
        if self.resources.generation == generation() and not here:
            self.reaper.thread.join()

    def _stop_lanes(self) -> None:
        """Stop the lanes after their pending transfers. Submits that began before the stop issue or queue first."""
        for lane in self.lanes.values():
            with lane.lock:
                pass
        for lane in self.lanes.values():
            lane.stop()

    def _ended(self) -> bool:
        """Return whether all lanes and transfers have ended, and all calls of prepare have returned."""
        lanes = self.lanes.values()
        self.reap()  # a list that has failed holds up its thread until the failure has been seen
        return all(lane.joined() for lane in lanes) and not self.reap() and not self._preparing

    def _left(self) -> tuple[int, int]:
        """Return the number of transfers, and of calls of prepare, that have not ended."""
        return sum(len(lane.flying) + lane.queued for lane in self.lanes.values()), len(self._preparing)

    def _tear_down(self) -> None:
        """Give all resources back to the driver. No transfer is in flight."""
        resources = self.resources
        device = resources.device
        with device.current(), Uncaptured(device):
            self.rooms.close()
            resources.tables.close()
            resources.handles.close()
            resources.slots.close()
            resources.memory.close()
