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
from kvplan.execute.gpu.paths import INLINE_EFFORT, Path
from kvplan.execute.gpu.resources import Resources
from kvplan.execute.transfer import Transfer
from kvplan.layout.strides import Int64Array

# Calls in flight on a lane from which on the issuer makes them, since the driver's queue may be full (player.py, PACE).
MOST_CALLS = 192
# Transfers in flight at which a submit looks which have ended: loans are kept for ever, so the most at once count.
REAP_EVERY = 8


LEGACY = 1  # CU_STREAM_LEGACY: the default stream, whose handle 0 is no stream in rows


class Lane:
    """The streams of one direction and priority, each made at its first use, and the transfers on them.

    A GPU has few hardware queues, and streams of one queue delay each other. The streams are:

    - ``copy``: for the copy engine.
    - ``kernel``: for kernels, which are short, and other work waits for them; or the caller's.
    - ``other``: a second such stream, so that two chunks of a load can be ready at once. Some compute holds every SM
      until it ends. If a kernel becomes ready only after another kernel has ended, the compute has taken the SMs again.
      Stores do not use this stream: two kernels that fill slots at once fill the first slot later.
    - ``gate``: only waits for events of other owners, and records the transfers' own behind them.

    Args:
        backend: the executor.
        direction: ``"load"``, ``"store"`` or ``"device"``.
        urgent: whether it is for transfers of high priority; then its streams have the highest priority.

    Attributes:
        flying: issued transfers, in order; some may have ended.
        last: the last of them.
        pending: transfers that are not issued yet, in order of their submits.
    """

    def __init__(self, backend: Resources, direction: str, *, urgent: bool) -> None:
        self.backend, self.direction, self.urgent = backend, direction, urgent
        self.flying: deque[GpuTransfer] = deque()
        self.last: GpuTransfer | None = None
        self.pending: deque[GpuTransfer] = deque()
        self._calls = 0  # driver calls of the transfers in flight
        self._streams: dict[str, int] = {}

    # Streams.

    def stream(self, name: str) -> int:
        """Return the handle of a stream, and make it at its first use."""
        if name not in self._streams:
            with self.backend.lock:  # two threads shall not make two
                stream = self._streams.get(name, self.backend.lent() if name in ("kernel", "other") else None)
                if stream is None:
                    stream = self.backend.stream(urgent=self.urgent if name == "copy" else name != "gate")
                self._streams[name] = stream or LEGACY
        return self._streams[name]

    def _ends(self, path: Path) -> tuple[int, int]:
        """Return the streams on which transfers of a path begin and end."""
        enter, leave = path.streams if self.direction == "load" else path.streams[::-1]
        return self.stream(enter), self.stream(leave)

    # Submitting.

    def follow(self, transfer: GpuTransfer, after: Any) -> None:
        """Let a transfer follow ``after``: note what its calls wait for, or what only the CPU can wait for.

        The executor's lock is not held: ``after`` may be a transfer of another executor, which has its own.

        Raises:
            TransferError: ``after`` is a transfer that failed, or the driver cannot record an event.
        """
        device, stream = self.backend.device, stream_handle(after)
        if isinstance(after, GpuTransfer) and after.backend is self.backend:
            transfer.follows = after
            return
        if isinstance(after, GpuTransfer) and after.ordered:
            stream = self.stream("gate")
            after.precede(stream)
        elif isinstance(after, Transfer):
            if after.done():
                after.synchronize()  # raises its error
            else:
                transfer.after = after
            return
        elif stream is None or getattr(after, "device_index", device.ordinal) != device.ordinal:
            theirs = after if stream is None else after.record_event()  # on the stream's own device
            event = event_handle(theirs)  # torch destroys it with `theirs`
            if event is None:
                transfer.after = after
            if not event:  # one that was never recorded counts as passed
                return
            stream = self.stream("gate")
            device.wait(stream, event)  # its owner may record it again
        transfer.behind_event = self._recorded(stream, transfer)

    def _recorded(self, stream: int, transfer: GpuTransfer) -> int:
        event = transfer.event()
        self.backend.device.record(event, stream)
        return event

    def put(self, transfer: GpuTransfer) -> None:
        """Issue a transfer; or queue it, if the CPU must wait before it begins. The executor's lock is held."""
        follows = transfer.follows
        if self.pending or transfer.after is not None or (follows is not None and follows.queued):
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
        with self.backend.inside(), self.backend.lock:
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
            waiting = SimpleNamespace(synchronize=after.await_issue) if theirs else after
            if not self.backend.completed(transfer, waiting):
                return False
            for error in filter(None, transfer.answers or ()):
                raise error
            transfer.after = None
            if theirs:
                with self.backend.device.current():
                    self.follow(transfer, after)
        return transfer.follows is None or not transfer.follows.queued

    # Issuing. The executor's lock is held, and the device is current.

    def issue(self, transfer: GpuTransfer) -> None:
        """Write the calls of a transfer down, and make them; or let the issuer make them, if that takes long.

        Raises:
            BaseException: the path or the driver raises it. The transfer has it as its error.
        """
        backend, last, follows = self.backend, self.last, transfer.follows
        issuer = None
        try:
            rows, effort = self._write(transfer)
            if len(self.flying) % REAP_EVERY == REAP_EVERY - 1 or self._calls > MOST_CALLS:
                self.reap()
            busy = self.direction in backend.issuers and not backend.issuers[self.direction].idle(self.urgent)
            apart = transfer.pageable or effort > INLINE_EFFORT or self._calls > MOST_CALLS or busy
            others = [*transfer.behind]
            if follows is not None:
                follows._raise_error()
                others.append(follows)
            if last is not None and (last.path is not transfer.path or last.error is not None):
                others.append(last)  # the stream's order alone does not put the transfer behind the last one
            if others or transfer.behind_event:
                # This thread holds the interpreter while it makes calls, so it must not wait for another list.
                apart = apart or any(other.unplayed for other in others)
                front = self._front(transfer, others)
                rows = np.concatenate((front, rows))
                transfer.marked = [len(front) + number for number in transfer.marked]
            transfer.rows = rows
            issuer = backend.issuer(self.direction) if apart else None
            while issuer is not None and issuer.full(self.urgent):  # rare: few transfers are not played at once
                self.reap()  # a list that has failed stays in its slot until it is closed
            self.flying.append(transfer)
            self.last = transfer
            self._calls += transfer.launches
            if issuer is not None:
                issuer.push(rows, transfer.state, urgent=self.urgent)
                return
            backend.device.play(rows, transfer.state)
        except BaseException as error:
            if self.last is not transfer:  # no call was made
                transfer.fail(error)
                transfer.finish()
            elif issuer is None or not issuer.has(transfer.state):
                self.close_failed(transfer, error)
            raise
        if transfer.state[FAILED]:
            self.close_failed(transfer)
            transfer._raise_error()

    def _write(self, transfer: GpuTransfer) -> tuple[Int64Array, int]:
        """Return the calls of a transfer, and their effort: those of its groups of layers one after another."""
        path, rows, effort = transfer.path, [], 0
        begin = transfer.begin = transfer.event()
        transfer.marks = [transfer.event() for _ in transfer.pieces]
        for (_, piece), mark in zip(transfer.pieces, transfer.marks, strict=True):
            some, more = path.write(transfer, piece, begin, mark) if piece.nbytes else self._nothing(path, begin, mark)
            rows.append(some)
            effort += more
            begin = 0
        transfer.end = transfer.marks[-1]
        if len(rows) == 1:
            return rows[0], effort
        transfer.marked = list(accumulate(map(len, rows)))
        return np.concatenate(rows), effort

    def _nothing(self, path: Path, begin: int, end: int) -> tuple[Int64Array, int]:
        """Return the calls of a plan, or of a group of layers, without bytes."""
        enter, leave = self._ends(path)
        calls = [(RECORD, enter, begin), (WAIT, leave, begin)] if begin else []
        return rows_of([*calls, (RECORD, leave, end)]), len(calls) + 1

    def _front(self, transfer: GpuTransfer, others: Sequence[GpuTransfer]) -> Int64Array:
        """Return the calls by which the first stream waits for all earlier work that the transfer depends on."""
        enter, _ = self._ends(transfer.path)
        calls: list[tuple[int, ...]] = [(WAIT, enter, transfer.behind_event)] if transfer.behind_event else []
        for other in others:
            if other.over:
                continue
            transfer.hold(other)
            if other.unplayed:
                calls.append((AWAIT, 0, other.state.ctypes.data, int(other is transfer.follows)))
                transfer.kept += (other.state,)
            calls.append((WAIT, enter, other.end))
        return rows_of(calls)

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
            copy = self.stream("copy")
            for turn in range(2):  # first copy waits for every stream; then every stream waits for copy, and copy again
                for stream in dict.fromkeys((copy, *self._streams.values())):
                    if turn:
                        device.wait(stream, transfer.end)
                    device.wait(copy, self._recorded(stream, transfer))
                device.record(transfer.end, copy)
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
