"""A lane: the streams of one direction, on which transfers end in the order of their submits."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from kvplan.base.latch import Wake
from kvplan.base.line import Line
from kvplan.base.threads import Standby, Worker, aside
from kvplan.cuda.call_errors import error_of
from kvplan.cuda.call_list import FAILED, CallList, new_state, paced
from kvplan.errors import TransferError
from kvplan.execute.gpu.device_transfer import DeviceTransfer, Flights, Mark
from kvplan.execute.gpu.path import Path
from kvplan.execute.gpu.reaper import Alarm
from kvplan.execute.gpu.resources import Resources
from kvplan.execute.gpu.waits import Awaited, Wait, recorded, wait_for_issue
from kvplan.execute.transfer import CLOSED_ERROR, wait_on_cpu
from kvplan.plan.conflicts import conflict
from kvplan.plan.layers import cuts_of
from kvplan.plan.plan import Plan

if TYPE_CHECKING:
    from kvplan.cuda.issuer import Issuer

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
        issuer: the thread that makes the calls of long transfers without the interpreter; None before the first one.
        thread: the thread that issues pending transfers, those that wait on the CPU for their ``after=``.
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
        self.issuer: Issuer | None = None
        self._issuer_stopped = False
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

    # Issuing.

    def issue(
        self, transfer: DeviceTransfer, path: Path, waits: list[Wait], behind: list[DeviceTransfer], *,
        blocking: bool = False,
    ) -> None:  # fmt: skip
        """Issue a transfer. The device is current, and no other thread issues on this lane.

        Args:
            transfer: the transfer to issue.
            path: the path that moves its plan.
            waits: events and transfers that ``after=`` stands for.
            behind: transfers of the direction's other lane that this transfer conflicts with.
            blocking: whether the driver's calls may wait for the copying, as for pageable memory.

        Raises:
            BaseException: the path or the driver raises it. The transfer stays in flight until its issued work ends.
        """
        enter, leave = path.streams(self, transfer.plan.direction)
        begin, end = transfer.event(), transfer.event()
        given, plan = 0 if self.issuer is None else self.issuer.given, transfer.plan
        apart = blocking or self._issuing_apart or self.full()
        # This thread holds the interpreter while it makes calls, so it must not wait for another lane's list.
        apart = apart or any(not isinstance(one, int) and one.unplayed for one in (*waits, *behind))
        try:
            if plan.nbytes and not transfer.by_layer and enter == leave and not apart:
                prepared = path.prepare(transfer, plan, self)
                front = self._front(transfer, path, enter, waits, behind)
                if front.count:
                    transfer.play(front)
                if path.issue_recorded(transfer, prepared, begin, end):
                    self._fly(transfer, begin, end)
                    return
                calls = CallList()
                calls.record(begin, enter)
                path.write(transfer, prepared, calls)
                waits, behind = [], []
            else:
                calls = CallList()
                calls.record(begin, enter)
                self._write(transfer, path, leave, calls)
                if enter != leave and not plan.nbytes:
                    calls.wait(leave, begin)
            calls.record(end, leave)
            calls.close()
            apart = apart or calls.effort > self._resources.limits.inline_effort
            front = self._front(transfer, path, enter, waits, behind, apart=apart)
            if apart:
                self._give(transfer, front, calls, begin, end)
                return
            if front.count:
                transfer.play(front)
            transfer.play(calls)
            self._fly(transfer, begin, end)
        except BaseException as error:
            if self.issuer is not None and self.issuer.given != given:
                raise  # the list is played to its end
            self._end_broken(transfer, begin, end, error)
            raise

    def _front(
        self, transfer: DeviceTransfer, path: Path, enter: int, waits: list[Wait], behind: list[DeviceTransfer], *,
        apart: bool = False,
    ) -> CallList:  # fmt: skip
        """Return the calls by which a stream waits for all earlier work that the transfer depends on.

        If another thread makes the calls, the stream waits for an event as recorded now: its owner may record it again.
        """
        lock, last, calls = self._resources.lock, self.last, CallList()
        for wait in waits:
            if isinstance(wait, Awaited):
                self._write_wait(transfer, enter, wait, calls, checked=True)
            else:
                again = apart and transfer.kept is not None
                calls.wait(enter, recorded(wait, transfer, self.gate) if again else wait)
        for one in behind:
            self._write_wait(transfer, enter, one, calls)
        if last is not None and (last.path != path.name or not path.in_order or last._error is not None):
            with lock:
                if not last._over:
                    transfer.hold(last)
                    calls.wait(enter, last._end)
        calls.close()
        return calls

    def _write_wait(
        self, transfer: DeviceTransfer, enter: int, one: Awaited, calls: CallList, *, checked: bool = False
    ) -> None:  # fmt: skip
        """Let the first stream wait for another transfer; if ``checked``, its error is an error of this transfer."""
        if not isinstance(one, DeviceTransfer) or one.resources is not self._resources:
            one.await_issue()
            if not one.done():
                event = transfer.event()
                one.precede(self.gate)
                self._device.record(event, self.gate)
                calls.wait(enter, event)
            return
        one._notice()
        with self._resources.lock:
            if checked:
                one._raise_error()
            if one._over or not one._end:
                return
            transfer.hold(one)
            if one.unplayed and one._state is not None:
                calls.await_list(one._state, checked=checked)
            calls.wait(enter, one._end)

    def _write(self, transfer: DeviceTransfer, path: Path, leave: int, calls: CallList) -> None:
        """Write down the calls of a transfer that is cut by layers, or has two streams."""
        if not transfer.plan.nbytes:
            return
        cuts = cuts_of(transfer.plan, transfer.by_layer) if transfer.by_layer else None
        if cuts is not None:
            events = [transfer.event() for _ in cuts.layers]
            rows = path.write_layers(transfer, cuts, self, events, calls)
            if rows is not None:
                transfer.set_marks(list(map(Mark, cuts.layers, events, rows)))
                return
        marks = []
        for layers, plan in transfer.pieces():
            path.write(transfer, path.prepare(transfer, plan, self), calls)
            if transfer.by_layer:
                event = transfer.event()
                calls.record(event, leave)
                marks.append(Mark(layers, event, calls.count))
        transfer.set_marks(marks)

    @property
    def _issuing_apart(self) -> bool:
        """Return whether the thread without the interpreter has calls to make, so that further calls must queue."""
        return self.issuer is not None and not self.issuer.idle

    def _give(self, transfer: DeviceTransfer, front: CallList, calls: CallList, begin: int, end: int) -> None:
        """Let the thread without the interpreter make the calls of a transfer."""
        issuer, limits = self.issuer, self._resources.limits
        if issuer is None:
            issuer = self.issuer = self._device.issuer(f"kvplan-issue-{self.name}", self._resources.inside)
        if crowding := self._crowding(transfer):
            front.synchronize(crowding._end)
            front.close()
        segments, inserted = [*front.segments, *calls.segments], list[int]()
        if front.count + calls.count > limits.calls_in_flight:
            segments, inserted = paced(segments, limits.calls_in_flight, (transfer.event(), transfer.event()))
        transfer.shift_marks(front.count, inserted)
        state = transfer.take_list(segments, partial(self._close_failed, transfer))
        self._fly(transfer, begin, end)
        issuer.push(segments, state)

    def _crowding(self, transfer: DeviceTransfer) -> DeviceTransfer | None:
        """Return the transfer in flight that must end before the driver's queue has room; None if there is room."""
        most = self._resources.limits.lane_calls
        with self._resources.lock:
            left = self.calls
            if left <= most:
                return None
            for one in self.flying:
                left -= one.launches
                if left <= most and not one._over:
                    transfer.hold(one)
                    return one
        return None

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
        issuer = self.issuer
        if issuer is not None and not issuer.idle:  # the end is recorded behind the calls of earlier transfers
            try:
                calls = self._end_calls(transfer, end)
            except TransferError:
                transfer.lose()
                return
            issuer.push(calls.segments, transfer.take_list(calls.segments, partial(self._close_failed, transfer)))
        elif self._record_end(transfer, end):
            transfer.unplay()
        else:
            return
        if not transfer._end:
            self._fly(transfer, begin, end)

    def _close_failed(self, transfer: DeviceTransfer) -> None:
        """Fail a transfer whose list has failed in the thread without the interpreter. The executor's lock is held."""
        state = transfer._state
        if state is not None:
            transfer.fail(error_of(self._device, transfer._segments, state))
        self._record_end(transfer, transfer._end)

    def _record_end(self, transfer: DeviceTransfer, end: int) -> bool:
        """Record the end of a broken transfer behind all work of the lane; return False if the context is lost."""
        state = new_state()
        try:
            self._device.play(self._end_calls(transfer, end).segments, state)
        except TransferError:
            state[FAILED] = 1
        if state[FAILED]:  # the context is lost, with all work in flight
            transfer.lose()
        return not state[FAILED]

    def _end_calls(self, transfer: DeviceTransfer, end: int) -> CallList:
        """Return the calls that record an end behind all work of the lane, and put all later work behind this end.

        Calls of the broken transfer may be missing: those by which later transfers of its path would wait for it.
        """
        calls, copy, events = CallList(), self.copy, [(stream, transfer.event()) for stream in self.streams]
        for turn in range(2):  # first copy waits for every stream; then every stream waits for copy, and copy for them
            for stream, event in events:
                if turn:
                    calls.wait(stream, end)
                calls.record(event, stream)
                calls.wait(copy, event)
            calls.record(end, copy)
        calls.close()
        return calls

    def issue_later(
        self, transfer: DeviceTransfer, path: Path, after: Any, waits: list[Wait] | None, behind: list[DeviceTransfer],
        *, blocking: bool = False,
    ) -> None:  # fmt: skip
        """Queue a transfer for the lane's own thread, which holds no lock while it issues.

        While this thread has work, every submit queues its transfer here.

        Args:
            transfer, path, behind, blocking: as in :meth:`issue`.
            after: the object that the CPU waits for if ``waits`` is None.
            waits: as in :meth:`issue`; None if only the CPU can wait.
        """
        # The transfer waits for an event as recorded now: its owner may record it again before the transfer is issued.
        if waits is not None and transfer.kept is not None:
            waits = [recorded(one, transfer, self.gate) if isinstance(one, int) else one for one in waits]
        earlier: list[Awaited] = [*behind, *(wait for wait in waits or () if not isinstance(wait, int))]
        device = self._device

        def job() -> None:
            try:
                if not self._take(transfer, after if waits is None else None, earlier):
                    transfer.give_back()
                    return
                with device.current():
                    self.issue(transfer, path, waits or [], behind, blocking=blocking)
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

    def joined(self) -> bool:
        """Return whether both threads have ended, after :meth:`stop`."""
        if not self.thread.join(0):
            return False
        issuer = self.issuer
        if issuer is None:
            return True
        if not self._issuer_stopped:
            self._issuer_stopped = True
            issuer.stop()
        return issuer.worker.join(0)

    def _next(self) -> DeviceTransfer | None:
        """Wait for the transfer to issue next, and return it; None if the lane is stopped and none is pending."""
        while True:
            for _ in range(self.wake.qsize()):  # drop old wakes before the check of pending transfers
                self.wake.get()
            transfer = self.pending.first()
            if transfer is not None or self.pending.ended():
                return transfer
            self.wake.get()
