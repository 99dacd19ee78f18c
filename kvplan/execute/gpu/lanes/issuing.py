"""Issuing: the calls of a transfer are written down, and made by the submit or by a thread without the interpreter."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from kvplan.cuda.call_errors import error_of
from kvplan.cuda.call_list import FAILED, CallList, new_state, paced
from kvplan.errors import TransferError
from kvplan.execute.gpu.device_transfer import DeviceTransfer
from kvplan.execute.gpu.lanes.lane_streams import LaneStreams
from kvplan.execute.gpu.path import Path
from kvplan.execute.gpu.reaper import Alarm
from kvplan.execute.gpu.resources import Resources
from kvplan.execute.gpu.waits import Awaited, Mark, Wait, recorded
from kvplan.plan.layers import cuts_of

if TYPE_CHECKING:
    from kvplan.cuda.issuer import Issuer


# Transfers that a lane holds when a submit looks which have ended. Memory of loans is kept for ever, so the most loans
# at once count. Not all callers ask for ends, and the executor's thread looks rarely.
REAP_EVERY = 8


class Issuing(LaneStreams):
    """The part of a lane that issues transfers.

    Args:
        resources: resources of the executor.
        name: name of the lane.
        alarm: wakes the reaper, which watches transfers in flight.
        reap: takes back the memory and events of ended transfers, in all lanes.
        urgent: whether the lane is for urgent transfers.

    Attributes:
        issuer: the thread that makes the calls of long transfers without the interpreter; None before the first one.
    """

    def __init__(self, resources: Resources, name: str, alarm: Alarm, reap: Callable[[], int], *, urgent: bool) -> None:
        super().__init__(resources, name, urgent=urgent)
        self.issuer: Issuer | None = None
        self._alarm = alarm
        self._reap_all = reap
        self._most_calls = resources.limits.lane_calls

    def full(self) -> bool:
        """Return whether the driver's queue may have no room for the calls of another transfer.

        At times, the loans of ended transfers are taken back first.
        """
        if self.calls > self._most_calls or (self.flying and not len(self.flying) % REAP_EVERY):
            self._reap_all()
        return self.calls > self._most_calls

    def issue(self, transfer: DeviceTransfer, path: Path, waits: list[Wait], *, blocking: bool = False) -> None:
        """Issue a transfer. The device is current, and no other thread issues on this lane.

        Args:
            transfer: the transfer to issue.
            path: the path that moves its plan.
            waits: events and transfers that ``after=`` stands for.
            blocking: whether the driver's calls may wait for the copying, as for pageable memory.

        Raises:
            BaseException: the path or the driver raises it. The transfer stays in flight until its issued work ends.
        """
        enter, leave = path.streams(self, transfer.plan.direction)
        begin, end = transfer.event(), transfer.event()
        issuer, plan = self.issuer, transfer.plan
        given = 0 if issuer is None else issuer.given
        apart = blocking or (issuer is not None and not issuer.idle) or self.full()
        # This thread holds the interpreter while it makes calls, so it must not wait for another lane's list.
        if waits:
            apart = apart or any(not isinstance(one, int) and one.unplayed for one in waits)
        front: CallList | None = None
        try:
            if plan.nbytes and not transfer.by_layer and enter == leave and not apart:
                known = path.known(plan)
                # Before the waits, since what it uploads for all later transfers must not wait with this one.
                prepared = None if known is not None else path.prepare(transfer, plan, self)
                if waits or self._turns(path):
                    front = self._front(transfer, path, enter, waits)
                    if front.count:
                        transfer.play(front)
                if known is not None:
                    path.issue_known(transfer, known, self, begin, end)
                    self._fly(transfer, begin, end)
                    return
                if path.issue_recorded(transfer, prepared, begin, end):
                    self._fly(transfer, begin, end)
                    return
                front = CallList()  # its calls have been made
                calls = CallList()
                calls.record(begin, enter)
                path.write(transfer, prepared, calls)
            else:
                calls = CallList()
                calls.record(begin, enter)
                self._write(transfer, path, leave, calls)
                if enter != leave and not plan.nbytes:
                    calls.wait(leave, begin)
            calls.record(end, leave)
            calls.close()
            apart = apart or calls.effort > self._resources.limits.inline_effort
            if front is None:
                front = self._front(transfer, path, enter, waits, apart=apart)
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

    def _turns(self, path: Path) -> bool:
        """Return whether the stream's order alone does not put a transfer behind the last one."""
        last = self.last
        return last is not None and (last.path != path.name or last._error is not None)

    def _front(
        self, transfer: DeviceTransfer, path: Path, enter: int, waits: list[Wait], *, apart: bool = False
    ) -> CallList:
        """Return the calls by which a stream waits for all earlier work that the transfer depends on.

        If another thread makes the calls, the stream waits for an event as recorded now: its owner may record it again.
        """
        lock, last, calls = self._resources.lock, self.last, CallList()
        for wait in waits:
            if isinstance(wait, Awaited):
                self._write_wait(transfer, enter, wait, calls)
            else:
                again = apart and transfer.kept is not None
                calls.wait(enter, recorded(wait, transfer, self.gate) if again else wait)
        if last is not None and self._turns(path):
            with lock:
                if not last._over:
                    transfer.hold(last)
                    calls.wait(enter, last._end)
        calls.close()
        return calls

    def _write_wait(self, transfer: DeviceTransfer, enter: int, one: Awaited, calls: CallList) -> None:
        """Let the first stream wait for another transfer, whose error is an error of this transfer."""
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
            one._raise_error()
            if one._over or not one._end:
                return
            transfer.hold(one)
            if one.unplayed and one._state is not None:
                calls.await_list(one._state, checked=True)
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
        most = self._most_calls
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
        if transfer._end and not transfer.unplayed:
            return  # all calls were made, and only the rest of the submit was cut off: it may have ended by now
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
