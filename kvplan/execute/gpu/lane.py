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
    """A stream of a lane: created at the first use, and from then on an attribute of the lane."""

    def __init__(self, *, urgent: bool | None) -> None:
        self._urgent = urgent
        self._name = ""

    def __set_name__(self, owner: type, name: str) -> None:
        """Keep the name of the attribute. Python calls this when it makes the class."""
        self._name = name

    def __get__(self, lane: Lane, owner: type | None = None) -> int:
        """Return the stream. A helper thread, which no signal handler interrupts, creates it and sets the attribute."""
        aside(partial(lane.make, self._name, urgent=self._urgent))
        return int(vars(lane)[self._name])


class Lane(Flights):
    """The streams of one direction, and the transfers on them.

    Each stream is created at its first use: a GPU has few hardware queues, and streams of one queue delay each other.

    Args:
        resources: resources of the executor.
        name: name of the lane, and part of its thread's name.
        alarm: wakes the reaper, which watches transfers in flight.
        reap: takes back the memory and events of ended transfers, in all lanes.
        normal: for a lane of urgent transfers, the lane of the same direction for normal transfers; otherwise None.

    Attributes:
        urgent: whether the lane is for urgent transfers; then all its streams except ``gate`` have highest priority.
        copy: the stream for the copy engine.
        kernel: the stream for kernels, with highest priority: its kernels are short, and other work waits for them.
        other: a second such stream, so that two chunks of a load can be ready at once. Some compute holds every SM
            until it ends. If a kernel becomes ready only after another kernel has ended, compute has taken the SMs
            again. Stores do not use this stream: two kernels that fill slots at once fill the first slot later.
        gate: a stream that only waits for events of other owners, and records the transfer's own events behind them.
        side: more copy streams, if a transfer has used several.
        issuing: the transfer that a submit is issuing now.
        pending: transfers that the lane's thread has not issued yet, in the order of their submits.
        waiting: the transfer whose ``after=`` the lane's thread now waits for, on the CPU.
        lock: held by a thread that submits; the same lock for both lanes of a direction.
        owned: returns whether the calling thread holds the lock.
        thread: the thread that issues pending transfers.
        standby: a thread that waits in its place for objects that CUDA does not know.
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
        """Create a stream unless it exists; if ``urgent`` is None, with the priority of the lane's transfers."""
        if name not in vars(self):
            with self._device.current():
                vars(self)[name] = self._device.stream(urgent=self.urgent if urgent is None else urgent)

    @property
    def streams(self) -> tuple[int, ...]:
        """Return all streams of the lane that exist."""
        made = vars(self)
        return (*(made[name] for name in STREAMS if name in made), *self.side)

    def sides(self, count: int) -> list[int]:
        """Return ``count`` more copy streams; missing ones are created."""
        if len(self.side) < count:
            aside(partial(self._make_sides, count))
        return self.side[:count]

    def _make_sides(self, count: int) -> None:
        with self._device.current():
            while len(self.side) < count:
                self.side.append(self._device.stream(urgent=self.urgent))

    # Transfers of the lane.

    @property
    def busy(self) -> bool:
        """Return whether the lane's thread has transfers to issue, so that the next transfer must queue behind them."""
        return bool(self.pending.line) and self.pending.first() is not None

    @property
    def queued(self) -> int:
        """Return the number of transfers that the lane's thread has not issued."""
        return sum(not one._over for one in self.pending.entries())

    def entries(self) -> dict[DeviceTransfer, None]:
        """Return all transfers that may not have ended: pending, being issued, and in flight, in this order."""
        some = dict.fromkeys(self.pending.entries())
        if self.issuing is not None:
            some[self.issuing] = None
        return some | dict.fromkeys(self.flying.copy())

    def conflicting(self, plan: Plan) -> list[DeviceTransfer]:
        """Return the transfers of this lane that have not ended and conflict with a plan."""
        if not self.pending.line and not self.flying and self.issuing is None:
            return []
        return [one for one in self.entries() if not one._over and conflict(one.plan, plan)]

    def full(self) -> bool:
        """Return whether the driver's queue may have no room for the calls of another transfer."""
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
        """Issue a transfer. The device is current, and no other thread issues on this lane.

        Args:
            transfer: the transfer to issue.
            path: the path that moves its plan.
            waits: events and transfers that ``after=`` stands for.
            behind: transfers of the direction's other lane that this transfer conflicts with.

        Raises:
            BaseException: the path or the driver raises it. The transfer stays in flight until its issued work ends.
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
            whole = len(steps) == 1 and enter == leave and not steps[0][1]
            if not (whole and path.issue_recorded(transfer, steps[0][0], begin, end)):
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
        """Fail a transfer, and keep its loans until all work issued on the lane's streams has ended."""
        transfer.fail(error)
        device = self._device
        try:
            for stream in self.streams:
                event = transfer.event()
                device.record(event, stream)
                device.wait(self.copy, event)
            device.record(end, self.copy)
        except TransferError:  # the context is lost, with all work in flight
            transfer.lose()
            return
        self._fly(transfer, begin, end)

    def issue_later(
        self, transfer: DeviceTransfer, path: Path, after: Any, waits: list[Wait] | None, behind: list[DeviceTransfer]
    ) -> None:
        """Queue a transfer for the lane's own thread, which holds no lock while it issues.

        While this thread has work, every submit queues its transfer here.

        Args:
            transfer, path, behind: as in :meth:`issue`.
            after: the object that the CPU waits for if ``waits`` is None.
            waits: as in :meth:`issue`; None if only the CPU can wait.
        """
        # The transfer waits for an event as recorded now: its owner may record it again before the transfer is issued.
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
        """Wait on the CPU, in the lane's thread, for ``after`` and for the issue of the transfers ``earlier``.

        Returns:
            Whether the transfer can be issued; False if it was cancelled meanwhile.

        Raises:
            BaseException: ``after`` raised it.
        """
        self.waiting = transfer
        problem: BaseException | None = None
        try:
            problem = wait_on_cpu(after, self.standby, self.wake, lambda: transfer._over)
            for one in earlier if problem is None else ():
                wait_for_issue(one, transfer, self.wake)
            if problem is None and not transfer._over:
                self._wait_for_room()
        except BaseException as error:  # noqa: BLE001  # ignored if the transfer was cancelled
            problem = error
        self.waiting = None
        with self.lock:  # this submit may be nested in another submit, which may still be issuing
            pass
        if not transfer.take_up():
            return False
        if problem is not None:
            raise problem
        return True

    # The lane's thread.

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
        """Wait for the transfer to issue next, and return it; None if the lane is stopped and none is pending."""
        while True:
            for _ in range(self.wake.qsize()):  # drop old wakes before the check of pending transfers
                self.wake.get()
            transfer = self.pending.first()
            if transfer is not None or self.pending.ended():
                return transfer
            self.wake.get()
