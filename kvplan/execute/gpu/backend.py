"""One GPU's executor: checks a plan, chooses its path, issues it, and sees it to its end."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from threading import get_ident
from typing import Any

import numpy as np

from kvplan.base.process import check_process, compiles, generation
from kvplan.base.threads import acting
from kvplan.cost.model import Candidate
from kvplan.cost.policy import Policy
from kvplan.cost.profile import DeviceProfile
from kvplan.cuda.device import Device, Uncaptured
from kvplan.errors import KVPlanError, PathError, TransferError
from kvplan.execute.gpu import reaper as ending
from kvplan.execute.gpu import turns
from kvplan.execute.gpu import warmup as ahead
from kvplan.execute.gpu.arena import Arena
from kvplan.execute.gpu.copy_engine import CopyEngine2DPath, CopyEnginePath
from kvplan.execute.gpu.device_transfer import DeviceTransfer, current_stream, stream_handle
from kvplan.execute.gpu.graphs import Graphs
from kvplan.execute.gpu.kernel_path import KernelPath
from kvplan.execute.gpu.lane import Lane
from kvplan.execute.gpu.mixed import MixedPath
from kvplan.execute.gpu.reach import Reach
from kvplan.execute.gpu.selection import Candidates
from kvplan.execute.gpu.staged import StagedPath
from kvplan.execute.gpu.tables import Tables
from kvplan.execute.gpu.waits import Wait, waits_of
from kvplan.execute.stats import Tally
from kvplan.execute.transfer import CLOSED_ERROR
from kvplan.plan.descriptors import Seams
from kvplan.plan.layers import split_layers
from kvplan.plan.plan import Plan
from kvplan.plan.staging import Staging, stage
from kvplan.program.program import RunGroup

Path = KernelPath | CopyEnginePath | CopyEngine2DPath | StagedPath | MixedPath
# A transfer by layers is cut into at most this many, of not less than these bytes: each is a submit of its own.
LAYER_GROUPS, LAYER_GROUP_NBYTES = 16, 2 << 20
DIRECTION_LANES = ("load", "store")


class Runtime:
    """What an :class:`kvplan.Executor` of a GPU consists of.

    Its keeper thread keeps it alive until it is stopped and all that was submitted has ended.
    """

    def __init__(self, device: Device, policy: Policy, profile: DeviceProfile | None = None) -> None:
        self.generation = generation()
        self.device = device
        self.policy = policy
        lock: Any = threading.RLock()  # guards what all lanes share; taken inside a lane's lock, never around it
        self.lock = lock
        self._owned: Callable[[], bool] = lock._is_owned  # by the calling thread
        self.closed = False
        self.inside: set[int] = set()  # identifiers of its own threads, which cannot wait for its end
        self.preparing: dict[object, int] = {}  # the threads of calls of prepare that have not returned
        self.events: list[int] = []
        self.slots = Arena(partial(self._allocate, device.allocate_host), device.free_host, visible=True)
        self.memory = Arena(partial(self._allocate, device.allocate), device.free, visible=False)
        self.lanes = {name: Lane(device, name, self.inside) for name in DIRECTION_LANES}
        self.lanes |= {
            f"urgent {name}": Lane(device, f"urgent-{name}", self.inside, self.lanes[name]) for name in DIRECTION_LANES
        }
        self.wakes = [lane.wake for lane in self.lanes.values()]
        self.tables = Tables(self)
        load, store, urgent_load, urgent_store = self.lanes.values()
        # By urgency, and whether it is a store: the lane of a transfer, and the direction's other one.
        self._lanes_of = {
            (False, False): (load, urgent_load), (True, False): (urgent_load, load),
            (False, True): (store, urgent_store), (True, True): (urgent_store, store),
        }  # fmt: skip
        self.reach = Reach(device)
        self._stagings: weakref.WeakKeyDictionary[RunGroup, dict[bool, Staging]] = weakref.WeakKeyDictionary()
        self.kernel, self.staged = KernelPath(self, policy), StagedPath(self, policy)
        paths: tuple[Path, ...] = (
            CopyEnginePath(self, policy), CopyEngine2DPath(self, policy), self.kernel, self.staged,
            MixedPath(self, policy),
        )  # fmt: skip
        self.paths = {path.name: path for path in paths}
        self.candidates = Candidates(self, profile)
        self.tally = Tally()
        self.graphs = Graphs(self)
        self.keeper = ending.Keeper(self)
        self.owner: weakref.ref[object] | None = None

    def own(self, executor: object) -> None:
        """End when this object is no more, also where its finalizer is broken off."""
        self.owner = weakref.ref(executor, self.keeper.calls.put)  # one call of C

    def start(self) -> None:
        """Start its keeper.

        Raises:
            TransferError: there is no thread for it.
        """
        self.keeper.thread.start()

    def check_process(self) -> None:
        """This process made it; see :func:`kvplan.base.process.check_process`."""
        check_process(self.generation)

    # Submitting.

    def check_open(self) -> None:
        """Transfers can be submitted.

        Raises:
            TransferError: they cannot: it is closed, or belongs to another process.
        """
        self.check_process()
        if self.closed:
            raise TransferError(CLOSED_ERROR)

    def candidates_of(self, plan: Plan) -> list[Candidate]:
        """See :meth:`kvplan.Executor.candidates`."""
        self.check_open()
        with self.device.current():
            return self.candidates.all(plan)

    def prepare(self, plan: Plan | None, *, by_layer: bool) -> None:
        """See :meth:`kvplan.Executor.prepare`."""
        self.check_process()  # before the lock: in a fork's child it may be held by a thread that is not there
        ahead.prepare(self, plan, most_groups=LAYER_GROUPS if by_layer else 1)

    def submit(self, plan: Plan, after: Any, *, by_layer: bool, urgent: bool = False) -> DeviceTransfer:
        """Issue a plan, or let the lane's own thread do so where that takes long; returns at once."""
        with self.device.current():
            capturing = self.graphs.capturing(after)
            path, predicted, pageable = self.candidates.choose(plan, capturing=capturing is not None)
            transfer = DeviceTransfer(plan, self, path.name, predicted)
            if capturing is not None and urgent:
                raise PathError(
                    "a transfer of high priority cannot be captured into a CUDA graph; a graph has no order"
                )
            lane, other = self._lanes_of[urgent, plan.direction == "store"]
            # Within another call of the same thread, in a signal's handler or a finalizer: what that has half done is
            # not looked at, and nobody is waited for.
            within = self._owned() or lane.owned() or (acting and get_ident() in acting)
            if capturing is None and within:
                self.check_open()
                self._put(transfer, path, lane, other, after, late=True, by_layer=by_layer)
                return transfer
            with lane.lock:
                self.check_open()
                if capturing is not None:
                    self.graphs.capture(transfer, after, capturing)
                    return transfer
                late = pageable or path.slow(plan, _groups(plan, by_layer=by_layer))
                self._put(transfer, path, lane, other, after, late=late, by_layer=by_layer)
        return transfer

    def _put(
        self, transfer: DeviceTransfer, path: Path, lane: Lane, other: Lane, after: Any, *, late: bool, by_layer: bool
    ) -> None:  # fmt: skip
        """Issue a transfer, or queue it for the lane's own thread."""
        try:
            waits = waits_of(after, transfer)
            behind = turns.before(transfer.plan, other)
            late = late or waits is None or lane.busy or (lane.calls > turns.MANY_CALLS and turns.full(self, lane))
            late = late or (after is not None and isinstance(after, DeviceTransfer) and after.queued)
            late = late or (bool(behind) and any(one.queued for one in behind))
            if late:
                turns.issue_later(self, transfer, path, lane, after, waits, behind, by_layer=by_layer)
                return
            lane.issuing = transfer
            try:
                self._issue(transfer, path, lane, waits or [], behind, by_layer=by_layer)
            finally:
                lane.issuing = None
        except BaseException as error:
            if transfer._issued is None or not (transfer._begun or transfer in lane.pending.entries()):
                self._abandon(transfer, error)
            raise

    def cancel(self, transfer: DeviceTransfer) -> bool:
        """See :meth:`kvplan.Transfer.cancel`."""
        return turns.cancel(self, transfer)

    def in_flight(self) -> int:
        """Transfers that have not ended, as far as is known."""
        return turns.in_flight(self)

    def _abandon(self, transfer: DeviceTransfer, error: BaseException) -> None:
        """End a transfer that failed, unless something of it is in flight: then its last event does."""
        with self.lock:
            if not transfer._end and not transfer._over:
                transfer._fail(error)
                transfer._over = True
                transfer._give_back()

    def _issue(
        self, transfer: DeviceTransfer, path: Path, lane: Lane, waits: list[Wait], behind: list[DeviceTransfer], *,
        by_layer: bool,
    ) -> None:  # fmt: skip
        """Put a transfer on the lane's streams; the device is current and nobody else issues on this lane."""
        device, plan = self.device, transfer.plan
        entry, leave = path.streams(lane, plan.direction)
        begin, end = transfer.event(), transfer.event()
        try:
            steps = self._prepare(transfer, path, lane, by_layer=by_layer)
            for wait in waits:
                if isinstance(wait, DeviceTransfer):
                    wait.precede(entry)
                else:
                    device.wait(entry, wait)
            for one in behind:
                with self.lock:
                    if not one._over and one._end:
                        device.wait(entry, one._end)
            last = lane.last
            if last is not None and (last.path != path.name or not path.in_order or last._error is not None):
                with self.lock:
                    if not last._over:
                        device.wait(entry, last._end)
            device.record(begin, entry)
            for issue, mark in steps:
                issue()
                if mark:
                    device.record(mark, leave)
            if entry != leave and not steps:
                device.wait(leave, begin)
            device.record(end, leave)
            self._fly(transfer, lane, begin, end)
        except BaseException as error:
            if not transfer._end:
                self._end_broken(transfer, lane, begin, end, error)
            raise

    def _fly(self, transfer: DeviceTransfer, lane: Lane, begin: int, end: int) -> None:
        keeper = self.keeper
        with self.lock:
            try:
                transfer._begin, transfer._end = begin, end  # from here to the end of append no signal is looked at
                lane.last = transfer
                lane.calls += transfer.launches
                lane.flying.append(transfer)
            finally:
                if keeper.asleep:
                    keeper.asleep = False
                    keeper.calls.put(None)

    def _prepare(
        self, transfer: DeviceTransfer, path: Path, lane: Lane, *, by_layer: bool
    ) -> list[tuple[Callable[[], None], int]]:
        """All that comes before the first call of the driver: what issues each step, and the mark behind it."""
        plan = transfer.plan
        if not plan.nbytes:
            return []
        if not by_layer:
            return [(path.prepare(transfer, plan, lane), 0)]
        steps = []
        for layers, part in split_layers(plan, _groups(plan, by_layer=True)):
            mark = transfer.event()
            transfer._marks.append((layers, mark))
            transfer._steps.append(part)
            steps.append((path.prepare(transfer, part, lane), mark))
        return steps

    def _end_broken(
        self, transfer: DeviceTransfer, lane: Lane, begin: int, end: int, error: BaseException
    ) -> None:  # fmt: skip
        """What was issued before an error still runs: keep everything until all streams of the lane have passed it."""
        with self.lock:
            transfer._fail(error)
        device = self.device
        try:
            for stream in lane.streams:
                event = transfer.event()
                device.record(event, stream)
                device.wait(lane.copy, event)
            device.record(end, lane.copy)
        except TransferError:  # the context is lost, and with it all that runs
            transfer._over = True
            return
        self._fly(transfer, lane, begin, end)

    # What the paths ask for.

    def staging(self, group: RunGroup, direction: str) -> Staging:
        """How a group goes through the ring."""
        load, made = direction == "load", self._stagings.get(group)
        if made is None or load not in made:
            with self.lock:
                made = self._stagings.setdefault(group, {})
                made[load] = made.get(load) or stage(group, host_is_src=load)
        return made[load]

    def seams(self, plan: Plan) -> Seams:
        """Those of the plan, and the ends of registrations that nobody told of."""
        facts = self.reach.facts
        if not any(facts(src).seams or facts(dst).seams for src, dst in plan.layouts):
            return plan.seams
        found = [[facts(layout).seams for layout in side] for side in zip(*plan.layouts, strict=True)]
        return Seams(
            *(
                np.union1d(told, np.array([seam for seams in side for seam in seams], dtype=np.int64))
                for told, side in zip(plan.seams, found, strict=True)
            )
        )

    def take_event(self) -> int:
        """An event nobody else uses; in a thread that no signal comes into."""
        try:
            return self.events.pop()
        except IndexError:
            return self.device.event()

    def make_event(self) -> None:
        """One more event that nobody uses yet."""
        with self.device.current():
            self.events.append(self.device.event())

    def _allocate(self, allocate: Callable[[int], int], nbytes: int) -> int:
        with self.device.current():
            return allocate(nbytes)

    def stream_handle(self, stream: Any) -> int:
        """Handle of what ``wait`` was given.

        Raises:
            KVPlanError: it is no stream.
        """
        handle = current_stream(self.device.ordinal) if stream is None else stream_handle(stream)
        if handle is None:
            raise KVPlanError(
                f"stream is a {type(stream).__name__}; give a stream, such as torch.cuda.current_stream()"
            )
        return handle

    # The ends.

    def poll(self, transfer: DeviceTransfer) -> bool:
        """Whether a transfer has ended."""
        if transfer._over:
            return True
        with self.device.current(), Uncaptured(self.device):
            return self._retired(transfer)

    def _retired(self, transfer: DeviceTransfer) -> bool:
        with self.lock:
            return transfer._retire()

    def block(self, transfer: DeviceTransfer) -> None:
        """Wait for a transfer on the CPU."""
        me, blockers = object(), transfer._blockers
        with self.device.current(), Uncaptured(self.device):
            try:
                with self.lock:
                    if transfer._over:
                        return
                    blockers.append(me)  # its events stay its own
                self.device.driver.cuEventSynchronize(transfer._end)  # what is wrong, the query below says
            finally:
                if me in blockers:
                    blockers.remove(me)
            while not self._retired(transfer):  # the call returned, but the event has not passed
                time.sleep(20e-6)
            self._reap()  # those before it have ended too

    def reap(self) -> int:
        """Let go of what has ended; returns how many are left."""
        with self.device.current(), Uncaptured(self.device):
            return self._reap()

    def _reap(self) -> int:
        left = 0
        with self.lock:
            for lane in self.lanes.values():
                while True:
                    if not lane.flying:  # asked behind the jump back, where a handler may have taken the last one out
                        break
                    first = lane.flying[0]
                    if not first._retire() or not first._settled:
                        break
                    if lane.flying and lane.flying[0] is first:  # else whoever came between has taken it out
                        lane.calls -= first.launches  # from here to the end of popleft no signal is looked at
                        lane.flying.popleft()
                last = lane.last
                if last is not None and last._over:
                    lane.last = None
                left += len(lane.flying)
        return left

    def stop(self) -> None:
        """Take no more; what was submitted goes on. Returns at once."""
        if self.generation == generation():
            self.closed = True
            self.keeper.stop()

    def close(self) -> None:
        """Stop, and wait until all has ended and everything is given back."""
        self.stop()
        # What a lane's thread runs for an `after=` cannot wait for the lane's own end, nor a signal's handler or a
        # finalizer for the call that it came into.
        me = get_ident()
        here = me in self.inside or me in self.preparing.values() or me in acting or compiles()
        here = here or self._owned() or any(lane.owned() for lane in self.lanes.values())
        if self.generation == generation() and not here:
            self.keeper.thread.join()

    def stop_lanes(self) -> None:
        """Let the lanes end behind what they have; every submit that found it open has been issued or queued then."""
        for name in DIRECTION_LANES:
            with self.lanes[name].lock:
                pass
        for lane in self.lanes.values():
            lane.stop()

    def tear_down(self) -> None:
        """Give everything back to the driver; nothing is in flight."""
        device = self.device
        with device.current(), Uncaptured(device):
            cu = device.driver
            self.graphs.close()
            self.staged.close()
            self.tables.close()
            for lane in self.lanes.values():
                for stream in lane.streams:
                    cu.cuStreamDestroy_v2(stream)
            for event in self.events:
                cu.cuEventDestroy_v2(event)
            self.events.clear()
            self.slots.close()
            self.memory.close()


def _groups(plan: Plan, *, by_layer: bool) -> int:
    """Groups of layers that a transfer is cut into, at most."""
    return min(LAYER_GROUPS, max(plan.nbytes // LAYER_GROUP_NBYTES, 1)) if by_layer else 1
