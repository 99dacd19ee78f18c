"""A lane: the streams of one direction and priority, and the transfers on them, which end in the order of submits."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvplan.cuda.device import Uncaptured
from kvplan.cuda.handles import event_handle, stream_handle
from kvplan.cuda.rows import AWAIT, ENDED, FAILED, RECORD, WAIT, error_of, rows_of
from kvplan.errors import TransferError
from kvplan.execute.gpu.gpu_transfer import GpuTransfer
from kvplan.execute.gpu.path import INLINE_EFFORT, Written
from kvplan.execute.gpu.resources import Resources
from kvplan.execute.transfer import Transfer, call_when_done

# Calls in flight on a lane from which on the issuer makes them, since the driver's queue may be full (player.py, PACE).
MOST_CALLS = 192
# Transfers in flight at which a submit looks which have ended: loans are kept for ever, so the most at once count.
REAP_EVERY = 8


LEGACY = 1  # CU_STREAM_LEGACY: the default stream, whose handle 0 is no stream in rows
STREAMS = frozenset(("copy", "kernel", "other", "gate"))


class Theirs(int):
    """An event of another owner, who may record it again."""


Wait = int | GpuTransfer  # an event, or a transfer of the same executor


class Issue:
    """The issue of another executor's transfer, as an ``after=`` of its own: streams can wait for the rest."""

    def __init__(self, transfer: GpuTransfer) -> None:
        self.synchronize = transfer.await_issue


@dataclass(eq=False)
class Pending:
    """A transfer that the executor's thread issues later.

    Attributes:
        transfer, blocking: as in :meth:`Lane.issue`.
        waits: events and transfers that it follows.
        after: the ``after=`` that only the CPU can wait for; None without one.
        asked, ended: whether a thread waits for it, once the transfer is the lane's next; and whether it has completed.
        error: the error that the wait raised, or None.
    """

    transfer: GpuTransfer
    waits: list[Wait]
    after: Any
    blocking: bool
    asked = ended = False
    error: BaseException | None = None


class Lane:
    """The streams of one direction and priority, each made at its first use, and the transfers on them.

    A GPU has few hardware queues, and streams of one queue delay each other.

    Args:
        backend: the executor.
        direction: ``"load"``, ``"store"`` or ``"device"``.
        urgent: whether it is for transfers of high priority; then its streams have the highest priority.

    Attributes:
        flying: issued transfers, in order; some may have ended.
        last: the last of them.
        pending: transfers that are not issued yet, in order of their submits.
        streams: all streams made so far.
        copy: the stream for the copy engine.
        kernel: the stream for kernels, which are short, and other work waits for them; or the caller's.
        other: a second such stream, so that two chunks of a load can be ready at once. Some compute holds every SM
            until it ends. If a kernel becomes ready only after another kernel has ended, the compute has taken the SMs
            again. Stores do not use this stream: two kernels that fill slots at once fill the first slot later.
        gate: a stream that only waits for events of other owners, and records the transfers' own behind them.
    """

    copy: int
    kernel: int
    other: int
    gate: int

    def __init__(self, backend: Resources, direction: str, *, urgent: bool) -> None:
        self.backend, self.direction, self.urgent = backend, direction, urgent
        self.flying: deque[GpuTransfer] = deque()
        self.last: GpuTransfer | None = None
        self.pending: deque[Pending] = deque()
        self._calls = 0  # driver calls of the transfers in flight
        self.streams: list[int] = []

    # Streams.

    def __getattr__(self, name: str) -> int:
        """Make a stream at its first use; from then on it is an attribute."""
        if name not in STREAMS:
            raise AttributeError(name)
        with self.backend.lock:  # two threads shall not make two
            if name not in vars(self):
                stream = self.backend.lent() if name in ("kernel", "other") else None
                if stream is None:
                    stream = self.backend.handles.stream(urgent=self.urgent if name == "copy" else name != "gate")
                stream = stream or LEGACY
                self.streams.append(stream)
                setattr(self, name, stream)
        return int(vars(self)[name])

    # Submitting.

    def waits_for(self, after: Any, transfer: GpuTransfer) -> tuple[list[Wait], Any]:
        """Return the events and transfers that ``after`` stands for; and what only the CPU can wait for, or None.

        The executor's lock is not held: ``after`` may be a transfer of another executor, which has its own.

        Raises:
            TransferError: ``after`` is a transfer that failed, or the driver cannot record an event.
        """
        device = self.backend.device
        if after is None:
            return [], None
        if isinstance(after, GpuTransfer):
            if after.backend is self.backend:
                return [after], None
            if not after.ordered:
                return [], after
            after.precede(self.gate)
            return [self._recorded(self.gate, transfer)], None
        if isinstance(after, Transfer):
            if not after.done():
                return [], after
            after.synchronize()  # raises its error
            return [], None
        handle = stream_handle(after)
        if handle is not None:
            if getattr(after, "device_index", device.ordinal) == device.ordinal:
                return [self._recorded(handle, transfer)], None
            after = after.record_event()  # only the stream's own device can record on it
        theirs = event_handle(after)
        if theirs is None:
            return [], after
        transfer.kept.append(after)
        return [Theirs(theirs)] if theirs else [], None  # an event that was never recorded counts as passed

    def _recorded(self, stream: int, transfer: GpuTransfer) -> int:
        event = transfer.event()
        self.backend.device.record(event, stream)
        return event

    def _as_now(self, wait: Wait, transfer: GpuTransfer) -> Wait:
        """Return an own event behind another owner's event as recorded now."""
        if not isinstance(wait, Theirs):
            return wait
        self.backend.device.wait(self.gate, wait)
        return self._recorded(self.gate, transfer)

    def put(self, transfer: GpuTransfer, waits: list[Wait], after: Any, *, blocking: bool) -> None:
        """Issue a transfer; or queue it, if the CPU must wait before it begins. The executor's lock is held."""
        early = after is not None or any(isinstance(one, GpuTransfer) and one.queued for one in waits)
        if not early and not self.pending:
            self.issue(transfer, waits, blocking=blocking)
            return
        waits = [self._as_now(one, transfer) for one in waits]
        transfer.queued = True
        self.pending.append(Pending(transfer, waits, after, blocking))

    def advance(self) -> bool:
        """Issue the next pending transfer, if it may begin, in the executor's thread; return whether it is gone."""
        if not self.pending:
            return False
        pending, backend = self.pending[0], self.backend
        transfer, waits, error = pending.transfer, pending.waits, None
        if not transfer.over:
            try:
                if pending.after is not None:
                    if not pending.asked:
                        self._ask(pending)
                    if not pending.ended:
                        return False
                    error = pending.error
                if any(isinstance(one, GpuTransfer) and one.queued for one in waits):
                    return False
                with backend.device.current():
                    if error is None and isinstance(pending.after, GpuTransfer):
                        waits = waits + self.waits_for(pending.after, transfer)[0]
            except BaseException as problem:  # noqa: BLE001  # it is the transfer's; the next one must still run
                error = problem
        with backend.inside():
            if not transfer.over and error is None:
                try:
                    self.issue(transfer, waits, blocking=pending.blocking)
                except BaseException as problem:  # noqa: BLE001
                    error = problem
            if error is not None and transfer not in self.flying and not transfer.over:
                transfer.fail(error)
                transfer.finish()
            self.pending.popleft()
            transfer.queued = False
        return True

    def _ask(self, pending: Pending) -> None:
        """Let a thread wait for the ``after=`` of a pending transfer."""

        def ended(error: BaseException | None) -> None:
            pending.error, pending.ended = error, True
            self.backend.bell.ring()

        pending.asked, after = True, pending.after
        call_when_done(Issue(after) if isinstance(after, GpuTransfer) else after, ended, self.backend.threads)

    # Issuing. The executor's lock is held, and the device is current.

    def issue(self, transfer: GpuTransfer, waits: Sequence[Wait], *, blocking: bool) -> None:
        """Write the calls of a transfer down, and make them; or let the issuer make them, if that takes long.

        Args:
            transfer: the transfer.
            waits: events and transfers that it follows.
            blocking: whether the calls may wait for the copying, as for pageable memory.

        Raises:
            BaseException: the path or the driver raises it. The transfer has it as its error.
        """
        backend, plan, path = self.backend, transfer.plan, transfer.path
        try:
            transfer.begin, transfer.end = transfer.events(2)
            if transfer.edges is not None:
                transfer.marks = transfer.events(len(transfer.edges) - 1)
            written = path.write(transfer) if plan.nbytes else _nothing(transfer, *path.streams(self, self.direction))
            if transfer.behind:
                transfer.behind = [one for one in transfer.behind if one not in waits]
                waits = [*waits, *transfer.behind]
            if len(self.flying) % REAP_EVERY == REAP_EVERY - 1 or self._calls > MOST_CALLS:
                with Uncaptured(backend.device):
                    backend.reap()
            issuer = backend.issuers.get(self.direction)
            apart = blocking or written.effort > INLINE_EFFORT or self._calls > MOST_CALLS
            apart = apart or (issuer is not None and not issuer.idle(self.urgent))
            rows, marked, last = written.rows, written.marked, self.last
            if waits or (last is not None and (last.path is not path or last.error is not None)):
                # This thread holds the interpreter while it makes calls, so it must not wait for another list.
                apart = apart or any(isinstance(one, GpuTransfer) and one.unplayed for one in waits)
                front = self._front(transfer, [self._as_now(one, transfer) for one in waits] if apart else waits)
                if front:
                    rows, marked = np.concatenate((rows_of(front), rows)), [len(front) + number for number in marked]
            transfer.rows, transfer.marked = rows, marked
            issuer = backend.issuer(self.direction) if apart else None
            while issuer is not None and issuer.full(self.urgent):  # rare: few transfers are not played at once
                with Uncaptured(backend.device):
                    backend.reap()  # a list that has failed stays in its slot until it is closed
        except BaseException as error:
            transfer.fail(error)
            transfer.finish()
            raise
        try:
            self.flying.append(transfer)
            self.last = transfer
            self._calls += transfer.launches
            if issuer is not None:
                issuer.push(rows, transfer.state, urgent=self.urgent)
                return
            backend.device.play(rows, transfer.state)
        except BaseException as error:
            if issuer is None or not issuer.has(transfer.state):
                self.close_failed(transfer, error)
            raise
        if transfer.state[FAILED]:
            self.close_failed(transfer)
            transfer._raise_error()

    def _front(self, transfer: GpuTransfer, waits: Sequence[Wait]) -> list[tuple[int, ...]]:
        """Return the calls by which the first stream waits for all earlier work that the transfer depends on."""
        enter, _ = transfer.path.streams(self, self.direction)
        calls: list[tuple[int, ...]] = []
        for wait in waits:
            if isinstance(wait, GpuTransfer):
                named = wait not in transfer.behind
                if named:
                    wait._raise_error()
                if wait.over:
                    continue
                transfer.hold(wait)
                if wait.unplayed:
                    calls.append((AWAIT, 0, wait.state.ctypes.data, int(named)))
                    transfer.kept.append(wait.state)
            calls.append((WAIT, enter, wait.end if isinstance(wait, GpuTransfer) else wait))
        last = self.last
        if last is not None and not last.over and (last.path is not transfer.path or last.error is not None):
            transfer.hold(last)  # the stream's order alone does not put the transfer behind the last one
            calls.append((WAIT, enter, last.end))
        return calls

    def close_failed(self, transfer: GpuTransfer, error: BaseException | None = None) -> None:
        """Fail a transfer whose calls were not all made, and keep its loans until all work of the lane has ended.

        Calls of it may be missing: those by which later transfers of its path would wait for it. So all streams of the
        lane wait for its end. If the context is lost, it is lost with it.
        """
        device = self.backend.device
        if error is None and transfer.rows is not None:
            error = error_of(device.driver, transfer.rows, transfer.state)
        transfer.fail(error or TransferError("its calls were not made"))
        try:
            for turn in range(2):  # first copy waits for every stream; then every stream waits for copy, and copy again
                for stream in tuple(dict.fromkeys((self.copy, *self.streams))):
                    if turn:
                        device.wait(stream, transfer.end)
                    device.wait(self.copy, self._recorded(stream, transfer))
                device.record(transfer.end, self.copy)
        except TransferError:
            transfer.finish(lost=True)
        transfer.state[FAILED] = transfer.state[FAILED] or 1
        transfer.state[ENDED] = 1  # now the issuer plays the next list

    def reap(self) -> int:
        """Forget ended transfers, and return how many are left. The lock is held, and the device current."""
        for one in tuple(self.flying):
            if not one.retire():
                break
        while self.flying and self.flying[0].over:
            self._calls -= self.flying.popleft().launches
        if self.last is not None and self.last.over:
            self.last = None
        return len(self.flying)


def _nothing(transfer: GpuTransfer, enter: int, leave: int) -> Written:
    """Return the calls of a transfer without bytes."""
    calls = [(RECORD, enter, transfer.begin), (WAIT, leave, transfer.begin), (RECORD, leave, transfer.end)]
    calls[2:2] = [(RECORD, leave, mark) for mark in transfer.marks]
    return Written(rows_of(calls), len(calls), [3 + k for k in range(len(transfer.marks))])
