"""A lane: the streams of one direction and priority, and the transfers on them, which end in the order of submits."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import numpy as np

from kvplan.cuda.device import Uncaptured
from kvplan.cuda.handles import event_handle, stream_handle
from kvplan.cuda.rows import AWAIT, ENDED, FAILED, RECORD, WAIT, error_of, rows_of
from kvplan.errors import TransferError
from kvplan.execute.gpu.gpu_transfer import GpuTransfer
from kvplan.execute.gpu.path import INLINE_EFFORT, Path
from kvplan.execute.gpu.resources import Resources
from kvplan.execute.transfer import Transfer
from kvplan.layout.strides import Int64Array

# Calls in flight on a lane from which on the issuer makes them, since the driver's queue may be full (player.py, PACE).
MOST_CALLS = 192
# Transfers in flight at which a submit looks which have ended: loans are kept for ever, so the most at once count.
REAP_EVERY = 8


LEGACY = 1  # CU_STREAM_LEGACY: the default stream, whose handle 0 is no stream in rows
STREAMS = frozenset(("copy", "kernel", "other", "gate"))


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
        self.pending: deque[GpuTransfer] = deque()
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

    def follow(self, transfer: GpuTransfer, after: Any) -> None:
        """Let a transfer follow ``after``: note what its calls wait for, or what only the CPU can wait for.

        The executor's lock is not held: ``after`` may be a transfer of another executor, which has its own.

        Raises:
            TransferError: ``after`` is a transfer that failed, or the driver cannot record an event.
        """
        device, handle = self.backend.device, stream_handle(after)
        if isinstance(after, GpuTransfer) and after.backend is self.backend:
            transfer.waits = [after]
        elif isinstance(after, GpuTransfer) and after.ordered:
            after.precede(self.gate)
            transfer.waits = [self._recorded(self.gate, transfer)]
        elif isinstance(after, Transfer):
            if after.done():
                after.synchronize()  # raises its error
            else:
                transfer.after = after
        elif handle is not None and getattr(after, "device_index", device.ordinal) == device.ordinal:
            transfer.waits = [self._recorded(handle, transfer)]
        else:
            theirs = after if handle is None else after.record_event()  # on the stream's own device
            event = event_handle(theirs)  # torch destroys it with `theirs`
            if event:  # its owner may record it again
                device.wait(self.gate, event)
                transfer.waits = [self._recorded(self.gate, transfer)]
            elif event is None:  # one that was never recorded counts as passed
                transfer.after = after

    def _recorded(self, stream: int, transfer: GpuTransfer) -> int:
        event = transfer.event()
        self.backend.device.record(event, stream)
        return event

    def put(self, transfer: GpuTransfer) -> None:
        """Issue a transfer; or queue it, if the CPU must wait before it begins. The executor's lock is held."""
        if self.pending or transfer.after is not None or _queued(transfer.waits):
            transfer.queued = True
            self.pending.append(transfer)
        else:
            self.issue(transfer)

    def advance(self) -> bool:
        """Issue the next pending transfer, if it may begin, in the executor's thread; return whether it is gone."""
        if not self.pending:
            return False
        transfer, error = self.pending[0], None
        try:
            if not (transfer.over or self._may_begin(transfer)):
                return False
        except BaseException as problem:  # it is the transfer's; the next one must still run
            error = problem
        with self.backend.inside():
            if error is not None:
                transfer.fail(error)
                transfer.finish()
            if not transfer.over:
                with suppress(BaseException):  # it is the transfer's error
                    self.issue(transfer)
            self.pending.popleft()
            transfer.queued = False
        return True

    def _may_begin(self, transfer: GpuTransfer) -> bool:
        """Return whether the CPU need not wait any more; raise the error of its ``after=``."""
        after = transfer.after
        if after is not None:
            theirs = isinstance(after, GpuTransfer)  # of another executor: when all its calls are made, streams wait
            if transfer.answers is None:
                transfer.answers = []
                waiting = SimpleNamespace(synchronize=after.await_issue) if theirs else after
                self.backend.await_on_cpu(waiting, transfer.answers)
            if not transfer.answers:
                return False
            if transfer.answers[0] is not None:
                raise transfer.answers[0]
            transfer.after = None
            if theirs:
                with self.backend.device.current():
                    self.follow(transfer, after)
        return not _queued(transfer.waits)

    # Issuing. The executor's lock is held, and the device is current.

    def issue(self, transfer: GpuTransfer) -> None:
        """Write the calls of a transfer down, and make them; or let the issuer make them, if that takes long.

        Raises:
            BaseException: the path or the driver raises it. The transfer has it as its error.
        """
        backend, path, last = self.backend, transfer.path, self.last
        try:
            rows, effort = self._write(transfer)
            waits = [*transfer.waits, *transfer.behind]
            if len(self.flying) % REAP_EVERY == REAP_EVERY - 1 or self._calls > MOST_CALLS:
                self.reap()
            issuer = backend.issuers.get(self.direction)
            apart = (
                transfer.pageable or effort > INLINE_EFFORT or self._calls > MOST_CALLS
                or (issuer is not None and not issuer.idle(self.urgent))
            )  # fmt: skip
            if waits or (last is not None and (last.path is not path or last.error is not None)):
                # This thread holds the interpreter while it makes calls, so it must not wait for another list.
                apart = apart or any(one.unplayed for one in waits if isinstance(one, GpuTransfer))
                front = self._front(transfer, waits)
                rows = np.concatenate((rows_of(front), rows))
                transfer.marked = [len(front) + number for number in transfer.marked]
            transfer.rows = rows
            issuer = backend.issuer(self.direction) if apart else None
            while issuer is not None and issuer.full(self.urgent):  # rare: few transfers are not played at once
                self.reap()  # a list that has failed stays in its slot until it is closed
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

    def _write(self, transfer: GpuTransfer) -> tuple[Int64Array, int]:
        """Return the calls of a transfer, and their effort: those of its groups of layers one after another."""
        plan, path = transfer.plan, transfer.path
        begin, end = transfer.begin, transfer.end = transfer.event(), transfer.event()
        if plan.nbytes and not transfer.pieces:
            result: tuple[Int64Array, int] = path.write(transfer, plan, begin, end)
            return result
        pieces = transfer.pieces or [(frozenset(), plan)]
        transfer.marks = [*(transfer.event() for _ in pieces[1:]), end]
        made, efforts = [], []
        for (_, piece), mark in zip(pieces, transfer.marks, strict=True):
            rows, effort = (
                path.write(transfer, piece, begin, mark) if piece.nbytes else self._nothing(path, begin, mark)
            )
            made.append(rows)
            efforts.append(effort)
            begin = 0
        transfer.marked = list(accumulate(map(len, made)))
        return np.concatenate(made), sum(efforts)

    def _nothing(self, path: Path, begin: int, end: int) -> tuple[Int64Array, int]:
        """Return the calls of a plan, or of a group of layers, without bytes."""
        enter, leave = path.streams(self, self.direction)
        calls = [(RECORD, enter, begin), (WAIT, leave, begin)] if begin else []
        return rows_of([*calls, (RECORD, leave, end)]), len(calls) + 1

    def _front(self, transfer: GpuTransfer, waits: Sequence[int | GpuTransfer]) -> list[tuple[int, ...]]:
        """Return the calls by which the first stream waits for all earlier work that the transfer depends on."""
        enter, _ = transfer.path.streams(self, self.direction)
        calls: list[tuple[int, ...]] = []
        for wait in waits:
            if isinstance(wait, GpuTransfer):
                named = wait in transfer.waits
                if named:
                    wait._raise_error()
                if wait.over:
                    continue
                transfer.hold(wait)
                if wait.unplayed:
                    calls.append((AWAIT, 0, wait.state.ctypes.data, int(named)))
                    transfer.keep(wait.state)
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

    def reap(self) -> None:
        """Forget ended transfers. The lock is held, and the device current."""
        with Uncaptured(self.backend.device):
            for one in tuple(self.flying):
                if not one.retire():
                    break
        while self.flying and self.flying[0].over:
            self._calls -= self.flying.popleft().launches
        if self.last is not None and self.last.over:
            self.last = None


def _queued(waits: Sequence[int | GpuTransfer]) -> bool:
    return bool(waits) and any(isinstance(one, GpuTransfer) and one.queued for one in waits)
