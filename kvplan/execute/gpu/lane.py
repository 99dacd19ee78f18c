"""A lane: the streams of one direction, on which transfers end in the order of their submits."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Any

from kvplan.base.latch import Wake
from kvplan.base.line import Line
from kvplan.base.threads import Standby, Worker, aside
from kvplan.errors import TransferError
from kvplan.execute.gpu.device_transfer import DeviceTransfer, Flights
from kvplan.execute.gpu.path import Path
from kvplan.execute.gpu.reaper import Alarm
from kvplan.execute.gpu.resources import Resources
from kvplan.execute.gpu.waits import Awaited, Wait, recorded, wait_for_issue
from kvplan.execute.transfer import CLOSED_ERROR, wait_on_cpu
from kvplan.plan.conflicts import conflict
from kvplan.plan.plan import Plan

STREAMS = ("copy", "kernel", "other", "gate")


class Stream:
    """A stream of a lane, made when it is first asked for, and from then on an attribute of the lane."""

    def __init__(self, *, urgent: bool | None) -> None:
        self._urgent = urgent
        self._name = ""

    def __set_name__(self, owner: type, name: str) -> None:
        """Keep the name of the attribute. Python calls this when it makes the class."""
        self._name = name

    def __get__(self, lane: Lane, owner: type | None = None) -> int:
        """Make the stream and set the lane's attribute, in a thread where no signal handler comes between the two."""
        aside(partial(lane.make, self._name, urgent=self._urgent))
        return int(vars(lane)[self._name])


class Lane(Flights):
    """The streams of one direction, and the transfers on them.

    Each stream is made when first used: a GPU has few hardware queues, and streams that share one wait for each other.

    Args:
        resources: of the executor.
        name: of the lane and its thread.
        alarm: wakes the thread that watches transfers in flight.
        reap: takes back the memory and events of ended transfers, in all lanes.
        normal: for a lane of urgent transfers, the lane of the same direction for normal transfers; otherwise None.

    Attributes:
        urgent: whether it is for urgent transfers: all its streams are of the highest priority.
        copy: the stream for the copy engine.
        kernel: the stream of kernels, of the highest priority: its kernels are short, and other work waits for them.
        other: a second such stream, so that two chunks of a load can be ready at once. Some compute holds every SM
            until it ends. If a kernel becomes ready only after another one has ended, the SMs are taken again by then.
            Stores do not use it: two kernels that fill slots at the same time fill the first slot later.
        gate: a stream that does nothing but wait for events; work that is issued later waits for it.
        side: more copy streams, where there are several.
        last: the last transfer issued, while it is in flight.
        flying: transfers in flight, in the order in which they end.
        calls: calls of the driver that issued them.
        issuing: the transfer that a submit is putting on the streams now.
        pending: transfers that the lane's thread has not issued yet, in the order of their submits.
        waiting: the transfer whose ``after=`` the lane's thread now waits for, on the CPU.
        lock: held by a thread that submits; the same for both lanes of a direction.
        owned: tells whether the calling thread holds the lock.
        thread: issues pending transfers.
        standby: waits in that thread's place for objects that CUDA does not know.
    """

    copy = Stream(urgent=None)
    kernel = Stream(urgent=True)
    other = Stream(urgent=True)
    gate = Stream(urgent=False)

    def __init__(
        self, resources: Resources, name: str, alarm: Alarm, reap: Callable[[], int], normal: Lane | None = None
    ) -> None:
        super().__init__()
        self.name = name
        self.urgent = normal is not None
        self._resources = resources
        self._device = resources.device
        self._alarm = alarm
        self._reap_all = reap
        self.side: list[int] = []
        self.issuing: DeviceTransfer | None = None
        self.pending: Line[DeviceTransfer] = Line()
        self.waiting: DeviceTransfer | None = None
        self.lock: Any = None
        self.lock = threading.RLock() if normal is None else normal.lock
        self.owned: Callable[[], bool] = getattr(self.lock, "_is_owned")  # noqa: B009  # the stubs lack it
        self.wake: Wake = SimpleQueue()
        self.stir: Callable[[], object] = partial(self.wake.put, None)
        self.thread = Worker(f"kvplan-{name}", self._serve, "no thread issues transfers", resources.inside)
        self.standby = Standby(resources.inside)

    # Streams.

    def make(self, name: str, *, urgent: bool | None) -> None:
        """Make a stream unless it exists; ``urgent`` of None gives it the priority of the lane's transfers."""
        if name not in vars(self):
            with self._device.current():
                vars(self)[name] = self._device.stream(urgent=self.urgent if urgent is None else urgent)

    @property
    def streams(self) -> tuple[int, ...]:
        """All its streams that exist."""
        made = vars(self)
        return (*(made[name] for name in STREAMS if name in made), *self.side)

    def sides(self, count: int) -> list[int]:
        """More copy streams; made when first asked for."""
        if len(self.side) < count:
            aside(partial(self._make_sides, count))
        return self.side[:count]

    def _make_sides(self, count: int) -> None:
        with self._device.current():
            while len(self.side) < count:
                self.side.append(self._device.stream(urgent=self.urgent))

    # What is on it.

    @property
    def busy(self) -> bool:
        """Whether its own thread has transfers to issue, so that the next one must queue behind them."""
        return bool(self.pending.line) and self.pending.first() is not None

    @property
    def queued(self) -> int:
        """Number of transfers that its thread has not issued."""
        return sum(not one._over for one in self.pending.entries())

    def entries(self) -> dict[DeviceTransfer, None]:
        """All transfers that may not have ended, in the order in which a transfer goes through the lane's places."""
        some = dict.fromkeys(self.pending.entries())
        if self.issuing is not None:
            some[self.issuing] = None
        return some | dict.fromkeys(self.flying.copy())

    def conflicting(self, plan: Plan) -> list[DeviceTransfer]:
        """List transfers that have not ended here and touch the same bytes as a plan."""
        if not self.pending.line and not self.flying and self.issuing is None:
            return []
        return [one for one in self.entries() if not one._over and conflict(one.plan, plan)]

    def full(self) -> bool:
        """Whether the driver's queue may have no room for the calls of another transfer."""
        most = self._resources.limits.lane_calls
        if self.calls <= most:
            return False
        self._reap_all()
        return self.calls > most

    def _wait_for_room(self) -> None:
        """Wait on the CPU, in the lane's thread, until the driver's queue has room."""
        while self.full():
            with self._resources.lock:
                first = self.flying[0] if self.flying else None
            if first is not None:
                first.block()

    # Issuing.

    def issue(self, transfer: DeviceTransfer, path: Path, waits: list[Wait], behind: list[DeviceTransfer]) -> None:
        """Put a transfer on the streams; the device is current, and no other thread issues on this lane.

        Args:
            transfer: to be issued.
            path: that moves its plan.
            waits: events and transfers that ``after=`` stands for.
            behind: transfers of the direction's other lane that it conflicts with.

        Raises:
            BaseException: of the path or the driver; what was issued before is in flight, and the transfer with it.
        """
        device, lock = self._device, self._resources.lock
        enter, leave = path.streams(self, transfer.plan.direction)
        begin, end = transfer.event(), transfer.event()
        try:
            steps = []
            if transfer.by_layer and transfer.plan.nbytes:
                for layers, plan in transfer.pieces():
                    mark = transfer.mark(layers)
                    steps.append((path.prepare(transfer, plan, self), mark))
            elif transfer.plan.nbytes:
                steps = [(path.prepare(transfer, transfer.plan, self), 0)]
            for wait in waits:
                if isinstance(wait, Awaited):
                    wait.precede(enter)
                else:
                    device.wait(enter, wait)
            for one in behind:
                with lock:
                    if not one._over and one._end:
                        device.wait(enter, one._end)
            last = self.last
            if last is not None and (last.path != path.name or not path.in_order or last._error is not None):
                with lock:
                    if not last._over:
                        device.wait(enter, last._end)
            device.record(begin, enter)
            for prepared, mark in steps:
                path.issue(transfer, prepared)
                if mark:
                    device.record(mark, leave)
            if enter != leave and not steps:
                device.wait(leave, begin)
            device.record(end, leave)
            self._fly(transfer, begin, end)
        except BaseException as error:
            if not transfer._end:
                self._end_broken(transfer, begin, end, error)
            raise

    def _fly(self, transfer: DeviceTransfer, begin: int, end: int) -> None:
        alarm = self._alarm
        with self._resources.lock:
            try:
                transfer.fly(begin, end, self)
            finally:
                if alarm.asleep:
                    alarm.asleep = False
                    alarm.calls.put(None)

    def _end_broken(self, transfer: DeviceTransfer, begin: int, end: int, error: BaseException) -> None:
        """Keep everything until all streams of the lane have passed what was issued before an error."""
        transfer.fail(error)
        device = self._device
        try:
            for stream in self.streams:
                event = transfer.event()
                device.record(event, stream)
                device.wait(self.copy, event)
            device.record(end, self.copy)
        except TransferError:  # the context is lost, and with it all that runs
            transfer.lose()
            return
        self._fly(transfer, begin, end)

    def issue_later(
        self, transfer: DeviceTransfer, path: Path, after: Any, waits: list[Wait] | None, behind: list[DeviceTransfer]
    ) -> None:
        """Leave a transfer to the lane's own thread, behind all that it has to issue; it holds no lock meanwhile.

        While it has work, submits queue here instead of going to the streams themselves.

        Args:
            transfer, path, behind: as in :meth:`issue`.
            after: what the CPU is to wait for, where ``waits`` is None.
            waits: as in :meth:`issue`; None where only the CPU can wait.
        """
        # An event counts as it is recorded now: before this is issued, its owner may record it again.
        if waits is not None and transfer.kept is not None:
            waits = [recorded(wait, transfer, self.gate) for wait in waits]
        earlier: list[Awaited] = [*behind, *(wait for wait in waits or () if not isinstance(wait, int))]
        device = self._device

        def job() -> None:
            try:
                if not self._take(transfer, after if waits is None else None, earlier):
                    transfer.give_back()
                    return
                with device.current(), device.patient():
                    self.issue(transfer, path, waits or [], behind)
            except BaseException as error:  # noqa: BLE001  # the transfer's error; the next transfer must still run
                transfer.abandon(error)

        if not self.thread.started:
            try:
                self.thread.start()
            except TransferError as error:
                why = error.__cause__
                raise TransferError(f"no thread issues a transfer of {transfer.plan.nbytes} bytes: {why}") from why
        transfer.defer(job)
        self.pending.append(transfer, self.stir)
        if self.pending.closed and self.pending.withdraws(transfer):
            raise TransferError(CLOSED_ERROR)

    def _take(self, transfer: DeviceTransfer, after: Any, earlier: list[Awaited]) -> bool:
        """Wait on the CPU, in the lane's thread, for ``after`` and for the issue of what comes before a transfer.

        Returns:
            False where the transfer was cancelled meanwhile.

        Raises:
            BaseException: what ``after`` raised.
        """
        self.waiting = transfer
        problem: BaseException | None = None
        try:
            problem = wait_on_cpu(after, self.standby, self.wake, lambda: transfer._over)
            for one in earlier if problem is None else ():
                wait_for_issue(one, transfer, self.wake)
            if problem is None and not transfer._over:
                self._wait_for_room()
        except BaseException as error:  # noqa: BLE001  # where the transfer was cancelled, its error is of no interest
            problem = error
        self.waiting = None
        with self.lock:  # a submit within which this one was made may still be issuing
            pass
        if not transfer.take_up():
            return False
        if problem is not None:
            raise problem
        return True

    # Its thread.

    def stop(self) -> None:
        """End the thread after it has issued all pending transfers."""
        self.pending.close(self.stir)

    def _serve(self) -> None:
        while (transfer := self._next()) is not None:
            transfer.issue_now()
            self.pending.take()
            transfer.is_issued()
            del transfer
        self.standby.dismiss()

    def _next(self) -> DeviceTransfer | None:
        """Wait for the transfer to issue next; None where there will be no more."""
        while True:
            for _ in range(self.wake.qsize()):  # the line is looked at after these wakes
                self.wake.get()
            transfer = self.pending.first()
            if transfer is not None or self.pending.ended():
                return transfer
            self.wake.get()
