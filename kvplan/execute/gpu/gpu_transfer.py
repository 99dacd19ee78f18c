"""Transfers of a GPU: what they borrow, how streams and threads wait for them, and how they end."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from kvplan.base.process import check_process, generation
from kvplan.cuda.device import NOT_READY, Uncaptured
from kvplan.cuda.handles import current_stream, stream_handle
from kvplan.cuda.reach import gpus_of
from kvplan.cuda.rows import ADDED, ENDED, FAILED, LAST_ROW, PLAYED, STATE_WORDS
from kvplan.errors import KVPlanError, TransferError
from kvplan.execute.gpu.memory import Piece
from kvplan.execute.gpu.resources import Resources
from kvplan.execute.transfer import Transfer, TransferResult, cancellation, check_layer
from kvplan.layout.strides import Int64Array
from kvplan.plan.layers import Edges, Layers, cut_groups, cuts_of
from kvplan.plan.plan import Plan

POLL_SECONDS, QUEUED_SECONDS = 20e-6, 1e-4  # between two looks of a thread that waits for the end, or for the issue


class Streams(Protocol):
    """The streams that a transfer runs on: its lane's; see :class:`kvplan.execute.gpu.lane.Lane`."""

    urgent: bool
    copy: int
    kernel: int
    other: int
    last: GpuTransfer | None

    def close_failed(self, transfer: GpuTransfer) -> None:
        """Fail a transfer whose calls were not all made."""


class GpuTransfer(Transfer):
    """A transfer between a GPU and pinned or pageable memory, within the GPU, or between GPUs.

    It is pending until its calls are written down, then issued, until all are made, and over when its last event has
    passed. It owns what it borrowed until then. Every change happens under the executor's lock.

    Attributes:
        backend, lane, path: what issues it.
        edges: edges of the groups of layers that it is cut into; None if it is not cut.
        predicted: predicted seconds on the GPU, or None.
        begin, end: events before and behind its work; 0 while it is pending.
        marks: for each group of layers, the event behind its bytes.
        marked: for each group of layers, its rows up to the record of this event.
        rows, state: the calls that issue it, and how many are made.
        kept: objects that must live until its end.
        queued: whether it is still to be issued by the executor's thread.
        over: whether it has ended.
        error: why it failed, or None.
        copies, launches: numbers that its path has counted.
    """

    begin = end = copies = launches = 0
    marks: Sequence[int] = ()
    marked: Sequence[int] = ()
    rows: Int64Array | None = None
    queued = over = cancelled = False
    error: BaseException | None = None
    _layers: Sequence[Layers] = ()  # of each group, once somebody has asked
    _result: TransferResult | None = None
    _holders = 0  # transfers that wait for its events, and threads that block on them

    def __init__(
        self, backend: Resources, lane: Streams, path: Any, plan: Plan, predicted: float | None, edges: Edges | None
    ) -> None:  # fmt: skip
        self.backend, self.lane, self.path = backend, lane, path
        self.plan, self.predicted, self.edges = plan, predicted, edges
        self.state: Int64Array = np.zeros(STATE_WORDS, dtype=np.int64)
        self.kept: list[object] = []
        self._pieces: list[Piece] = []
        self._events: list[int] = []
        self._held: list[GpuTransfer] = []  # those whose events its calls name
        self.behind: list[GpuTransfer] = []  # those whose end it awaits, well or not

    # What it borrows until its end.

    def slot(self, nbytes: int) -> Piece:
        """Borrow at least ``nbytes`` bytes of pinned memory."""
        self._pieces.append(piece := self.backend.slots.take(nbytes))
        return piece

    def scratch(self, nbytes: int) -> Piece:
        """Borrow at least ``nbytes`` bytes of GPU memory."""
        self._pieces.append(piece := self.backend.memory.take(nbytes))
        return piece

    def event(self) -> int:
        """Borrow an event."""
        return self.events(1)[0]

    def events(self, count: int) -> list[int]:
        """Borrow events."""
        made = self.backend.handles.events(count)
        self._events += made
        return made

    def count(self, copies: int, launches: int) -> None:
        """Add copies and driver calls to the counts of the result."""
        self.copies += copies
        self.launches += launches

    def hold(self, other: GpuTransfer) -> None:
        """Keep the events of another transfer until this one ends. The lock is held."""
        self._held.append(other)
        other._holders += 1

    def _let_go(self) -> None:
        """Give everything back, unless somebody still needs its events. The lock is held."""
        for other in self._held:
            other._holders -= 1
            if other.over:
                other._let_go()
        self._held.clear()
        self.behind = []
        if self._holders:
            return
        for piece in self._pieces:
            piece.free.append(piece)
        self.backend.handles.unused.extend(self._events)
        self._pieces, self._events, self.kept, self.rows = [], [], [], None

    # For the executor: queue, issue and end it.

    @property
    def unplayed(self) -> bool:
        """Return whether calls of its list are still to be made."""
        return not self.state[ENDED]

    @property
    def ordered(self) -> bool:
        """Return whether all its driver calls have been made: streams can wait at once."""
        return bool(self.state[ENDED]) and not self.queued

    def fail(self, error: BaseException) -> None:
        """Set its error, the first time. The lock is held; issued work is still in flight."""
        if self.error is None:
            self.error = error
            self.backend.tally.fail(self.plan, self.path.name, error)

    def finish(self, *, lost: bool = False) -> None:
        """End it. The lock is held. If the context is lost, its memory and events are lost, too."""
        self.over = True
        self.state[ENDED] = 1
        if lost:
            self._pieces, self._events = [], []
        self._let_go()
        self.queued = False

    def retire(self) -> bool:
        """End it if its last event has passed; return whether it has ended. The lock is held, the device current."""
        if self.over:
            return True
        state, device = self.state, self.backend.device
        if not state[ENDED]:
            if not state[FAILED]:
                return False
            self.lane.close_failed(self)
            if self.over:
                return True
        code = device.driver.cuEventQuery(self.end)
        if code == NOT_READY:
            return False
        if code:
            name = device.driver.name(code)
            self.fail(TransferError(f"cuEventQuery returned {name}: the transfer, or work before it"))
        elif self.error is None:
            launches = self.launches + int(state[ADDED])
            self._result = TransferResult(
                self.plan.nbytes, device.seconds(self.begin, self.end), self.path.name, self.copies, launches,
                self.predicted,
            )  # fmt: skip
            self.backend.tally.add(self._result, self.plan.direction)
        self.finish()
        return True

    # The methods of Transfer.

    def done(self) -> bool:
        """See :meth:`Transfer.done`."""
        if self.over:
            return True
        check_process(self.backend.generation)
        if self.queued:
            return False
        device = self.backend.device
        if device.is_current():  # as for most callers, who may ask often
            with Uncaptured(device), self.backend.lock:
                return self.retire()
        with self.backend.inside():
            return self.retire()

    def wait(self, stream: Any = None) -> None:
        """See :meth:`Transfer.wait`."""
        self._order(self._streams(stream), None)

    def wait_layer(self, layer: int, stream: Any = None) -> None:
        """See :meth:`Transfer.wait_layer`."""
        number = check_layer(self.plan, layer)
        self._order(self._streams(stream), number)

    def precede(self, stream: int) -> None:
        """Let the stream with this handle, of its GPU, wait for the end of this transfer."""
        self._order([(stream, self.backend.device.ordinal)], None)

    def write_behind(self, stream: int, addresses: Sequence[int], values: Sequence[int]) -> None:
        """Let a stream of its GPU wait for its end, and then write words of pinned memory. All its calls are made."""
        device = self.backend.device
        with self.backend.lock:
            self._raise_error()
            if not self.over:
                device.wait(stream, self.end)
            for address, value in zip(addresses, values, strict=True):
                code = device.driver.cuStreamWriteValue64_v2(stream, address, value, 0)
                device.driver.check("cuStreamWriteValue64", code)

    def await_issue(self) -> None:
        """See :meth:`Transfer.await_issue`."""
        check_process(self.backend.generation)
        self._await_rows(LAST_ROW)
        self._raise_error()

    def synchronize(self, timeout: float | None = None) -> None:
        """See :meth:`Transfer.synchronize`."""
        if not self.over:
            check_process(self.backend.generation)
            limit = None if timeout is None else time.monotonic() + timeout
            if not self._await_rows(LAST_ROW, limit, hurry=False):
                raise self._late(timeout)
            if limit is None:
                self._block()
            while not self.done():
                if limit is not None and time.monotonic() > limit:
                    raise self._late(timeout)
                time.sleep(POLL_SECONDS)
        self._raise_error()

    def result(self) -> TransferResult:
        """See :meth:`Transfer.result`."""
        self.synchronize()
        if self._result is None:
            raise TransferError("the transfer finished without a result")
        if self._result.predicted is None and self.backend.generation == generation():  # the policy names the path
            predicted = self.backend.expected(self.plan, self.path.name, self.edges)
            self._result = TransferResult(*self._result, predicted)
        return self._result

    def cancel(self) -> bool:
        """See :meth:`Transfer.cancel`. A transfer has begun when its calls are written down."""
        check_process(self.backend.generation)
        with self.backend.lock:
            if self.queued and not self.over:
                self.cancelled, self.error = True, TransferError(cancellation(self.plan))
                self.backend.tally.cancel()
                self.finish()
        self.backend.bell.ring()
        return self.cancelled

    @property
    def layer_groups(self) -> tuple[tuple[int, ...], ...]:
        """See :attr:`Transfer.layer_groups`."""
        if self.edges is None:
            return (self.plan.layers,)
        return tuple(tuple(sorted(layers)) for layers in self._groups(self.edges))

    def _groups(self, edges: Edges) -> Sequence[Layers]:
        """Return the layers of each group."""
        if not self._layers:
            cuts = cuts_of(self.plan, edges)
            self._layers = [layers for layers, _ in cut_groups(self.plan, edges)] if cuts is None else cuts.layers
        return self._layers

    def _streams(self, stream: Any) -> list[tuple[int, int]]:
        """Return handle and GPU of a caller's stream; of None, of torch's current streams on all GPUs of the plan."""
        here = self.backend.device.ordinal
        if stream is not None:
            found = [(stream_handle(stream), getattr(stream, "device_index", here))]
        else:
            found = [(current_stream(ordinal), ordinal) for ordinal in gpus_of(self.plan, here)]
        streams = [(handle, ordinal) for handle, ordinal in found if handle is not None]
        if not streams:
            raise KVPlanError(
                f"stream is a {type(stream).__name__}; give a stream, such as torch.cuda.current_stream()"
            )
        return streams

    def _order(self, streams: Sequence[tuple[int, int]], layer: int | None) -> None:
        """Let streams, given by handle and GPU, wait for the end, or for a layer."""
        check_process(self.backend.generation)
        group = None
        if layer is not None and self.edges is not None:
            group = next(k for k, layers in enumerate(self._groups(self.edges)) if layer in layers)
        self._await_queue()
        self._await_rows(LAST_ROW if group is None or not self.marked else self.marked[group])
        device = self.backend.device
        with self.backend.lock:
            self._raise_error()
            if self.over:
                return
            event = self.end if group is None or not self.marks else self.marks[group]
            for stream, ordinal in streams:
                # Default streams have the same handle on every GPU: the current GPU decides which one is meant.
                with (device if ordinal == device.ordinal else device.beside(ordinal)).current():
                    device.wait(stream, event)

    def _await_queue(self, limit: float | None = None) -> bool:
        """Block until it is issued or given up; return False after a limit."""
        while self.queued:
            if limit is not None and time.monotonic() > limit:
                return False
            time.sleep(QUEUED_SECONDS)
        return True

    def _await_rows(self, rows: int, limit: float | None = None, *, hurry: bool = True) -> bool:
        """Block until rows of its list have been played, or it has ended or failed; return False after a limit.

        If ``hurry``, they are played without waiting for the GPU: a stream shall wait for what they record.
        """
        if not self._await_queue(limit):
            return False
        state = self.state
        while not (state[ENDED] or state[FAILED] or state[PLAYED] >= rows):
            self.backend.device.watch(state, rows, hurry=hurry)
            if limit is not None and time.monotonic() > limit:
                return False
        if state[FAILED] and not self.over:
            with self.backend.inside():
                self.retire()  # notes the error
        return True

    def _block(self) -> None:
        """Block on the last event, without the lock and the interpreter."""
        with self.backend.inside():
            if self.retire():
                return
            self._holders += 1  # so that the event is not given back
        try:
            with self.backend.device.current():
                self.backend.device.driver.cuEventSynchronize(self.end)  # an error shows in the query that follows
        finally:
            with self.backend.inside():
                self._holders -= 1
                self.retire()
                if self.over:
                    self._let_go()

    def _raise_error(self) -> None:
        if isinstance(self.error, KVPlanError):
            raise self.error.with_traceback(None)  # otherwise each raise adds frames, which keep objects alive
        if self.error is not None:
            raise TransferError(f"transfer of {self.plan.nbytes} bytes failed: {self.error}") from self.error

    def __repr__(self) -> str:
        ended = "cancelled" if self.cancelled else "failed" if self.error else "done" if self.over else "in flight"
        return f"Transfer({self.plan!r}, {ended})"
