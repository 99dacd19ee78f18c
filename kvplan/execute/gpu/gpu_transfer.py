"""Transfers of a GPU: what they borrow, how streams and threads wait for them, and how they end."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Sequence
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np

from kvplan.base.process import check_process
from kvplan.cuda.device import NOT_READY
from kvplan.cuda.handles import current_stream, stream_handle
from kvplan.cuda.reach import gpus_of
from kvplan.cuda.rows import ADDED, ENDED, FAILED, LAST_ROW, PLAYED, STATE_WORDS
from kvplan.errors import KVPlanError, TransferError
from kvplan.execute.gpu.resources import Piece, Resources
from kvplan.execute.transfer import OwnTransfer, TransferResult, cancellation, check_layer
from kvplan.layout.strides import Int64Array
from kvplan.plan.plan import Plan

POLL_SECONDS, QUEUED_SECONDS = 20e-6, 1e-4  # between two looks of a thread that waits for the end, or for the issue


class Streams(Protocol):
    """The streams that a transfer runs on: its lane's; see :class:`kvplan.execute.gpu.lane.Lane`."""

    urgent: bool
    last: GpuTransfer | None

    def stream(self, name: str) -> int:
        """Return the handle of a stream."""

    def close_failed(self, transfer: GpuTransfer) -> None:
        """Fail a transfer whose calls were not all made."""


class GpuTransfer(OwnTransfer):
    """A transfer between a GPU and pinned or pageable memory, within the GPU, or between GPUs.

    It is pending until its calls are written down, then issued, until all are made, and over when its last event has
    passed. It owns what it borrowed until then. Every change happens under the executor's lock.

    Attributes:
        backend, lane, path: what issues it.
        predicted: predicted seconds on the GPU, or None.
        pageable: whether its calls may wait for the copying, as for pageable memory.
        pieces: for each group of layers that it is cut into, its layers and its plan; otherwise its plan alone.
        follows: the transfer of the same executor that it was submitted after.
        behind_event: an event that it waits for; 0 for none.
        behind: more transfers whose end it awaits, well or not.
        begin, end: events before and behind its work; 0 while it is pending.
        marks: for each group of layers, the event behind its bytes.
        marked: for each group of layers, its rows up to the record of this event.
        rows, state: the calls that issue it, and how many are made.
        ring: what it uses of the ring of the staged path.
        queued: whether it is still to be issued by the executor's thread.
        copies, launches: copies, and driver calls, that its path has written down.
        kept: objects that its calls name by address, and that live until its end.
    """

    begin = end = behind_event = copies = launches = 0
    follows: GpuTransfer | None = None
    behind: Sequence[GpuTransfer] = ()
    marks: Sequence[int] = ()
    marked: Sequence[int] = ()
    rows: Int64Array | None = None
    ring: Any = None
    queued = False
    kept: tuple[object, ...] = ()
    _held: tuple[GpuTransfer, ...] = ()  # those whose events its calls name
    _holders = 0  # transfers that wait for its events, and threads that block on them

    def __init__(
        self, backend: Resources, lane: Streams, path: Any, plan: Plan, predicted: float | None, *, pageable: bool
    ) -> None:  # fmt: skip
        self.backend, self.lane, self.path = backend, lane, path
        self.plan, self.predicted, self.pageable = plan, predicted, pageable
        self.pieces: Sequence[tuple[Collection[int], Plan]] = (((), plan),)
        self.state: Int64Array = np.zeros(STATE_WORDS, dtype=np.int64)
        self._pieces: list[Piece] = []
        self._events: list[int] = []

    # What it borrows until its end.

    def pinned(self, nbytes: int) -> Piece:
        """Borrow at least ``nbytes`` bytes of pinned memory."""
        self._pieces.append(piece := self.backend.pinned.take(nbytes))
        return piece

    def scratch(self, nbytes: int) -> Piece:
        """Borrow at least ``nbytes`` bytes of GPU memory."""
        self._pieces.append(piece := self.backend.memory.take(nbytes))
        return piece

    def event(self) -> int:
        """Borrow an event."""
        self._events.append(event := self.backend.event())
        return event

    def hold(self, other: GpuTransfer) -> None:
        """Keep the events of another transfer until this one ends. The lock is held."""
        self._held += (other,)
        other._holders += 1

    def _let_go(self) -> None:
        """Give everything back, unless somebody still needs its events. The lock is held."""
        held, self._held, self.behind, self.follows = self._held, (), (), None
        for other in held:
            other._holders -= 1
            if other.over:
                other._let_go()
        if self._holders:
            return
        for piece in self._pieces:
            piece.free.append(piece)
        self.backend.events.extend(self._events)
        self._pieces, self._events, self.kept, self.rows = [], [], (), None

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
            self.backend.tally.add(self._result, self.plan.direction, chosen=self.backend.policy.path == "auto")
        self.finish()
        return True

    # The methods of Transfer.

    def done(self) -> bool:
        """See :meth:`Transfer.done`."""
        if not self.over:
            check_process(self.backend.generation)
            if not self.queued:
                with self.backend.inside(), self.backend.lock:
                    self.retire()
        return self.over

    def wait(self, stream: Any = None) -> None:
        """See :meth:`Transfer.wait`."""
        self._order(stream)

    def wait_layer(self, layer: int, stream: Any = None) -> None:
        """See :meth:`Transfer.wait_layer`."""
        number = check_layer(self.plan, layer)
        group = next((k for k, (layers, _) in enumerate(self.pieces) if number in layers), None)
        self._order(stream, group)

    def precede(self, stream: int) -> None:
        """Let the stream with this handle, of its GPU, wait for the end of this transfer."""
        self._order(SimpleNamespace(cuda_stream=stream))

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
        self._await_rows()
        self._raise_error()

    def synchronize(self, timeout: float | None = None) -> None:
        """See :meth:`Transfer.synchronize`."""
        if not self.over:
            check_process(self.backend.generation)
            limit = math.inf if timeout is None else time.monotonic() + timeout
            if not self._await_rows(None, limit, hurry=False):
                raise self._late(timeout)
            if timeout is None:
                self._block()
            while not self.done():
                if time.monotonic() > limit:
                    raise self._late(timeout)
                time.sleep(POLL_SECONDS)
        self._raise_error()

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
        return super().layer_groups if len(self.pieces) == 1 else tuple(tuple(sorted(each)) for each, _ in self.pieces)

    def _order(self, stream: Any, group: int | None = None) -> None:
        """Let a caller's stream wait for the end, or for a group of layers.

        Without a stream, torch's current streams on all GPUs of the plan wait.
        """
        device = self.backend.device
        if stream is None:
            waiting = [(current_stream(ordinal), ordinal) for ordinal in gpus_of(self.plan, device.ordinal)]
        else:
            waiting = [(stream_handle(stream), getattr(stream, "device_index", device.ordinal))]
        if all(handle is None for handle, _ in waiting):
            kind = type(stream).__name__
            raise KVPlanError(f"stream is a {kind}; give a stream, such as torch.cuda.current_stream()")
        check_process(self.backend.generation)
        self._await_rows(group)
        with self.backend.lock:
            self._raise_error()
            event = self.end if group is None else self.marks[group]
            for handle, ordinal in waiting:
                if handle is not None and not self.over:
                    # Default streams have the same handle on every GPU: the current GPU decides which one is meant.
                    with (device if ordinal == device.ordinal else device.beside(ordinal)).current():
                        device.wait(handle, event)

    def _await_rows(self, group: int | None = None, limit: float = math.inf, *, hurry: bool = True) -> bool:
        """Block until its calls, or those of a group of layers, have been made, or it has ended or failed.

        If ``hurry``, they are made without waiting for the GPU: a stream shall wait for what they record. Return False
        after a limit.
        """
        state = self.state
        while self.queued or not (state[ENDED] or state[FAILED] or state[PLAYED] >= self._rows_of(group)):
            if time.monotonic() > limit:
                return False
            if self.queued:
                time.sleep(QUEUED_SECONDS)
            else:
                self.backend.device.watch(state, self._rows_of(group), hurry=hurry)
        if state[FAILED] and not self.over:
            with self.backend.inside(), self.backend.lock:
                self.retire()  # notes the error
        return True

    def _rows_of(self, group: int | None) -> int:
        return LAST_ROW if group is None else self.marked[group]

    def _block(self) -> None:
        """Block on the last event, without the lock and the interpreter."""
        with self.backend.inside(), self.backend.lock:
            self._holders += 1  # so that the event is not given back
        try:
            if not self.over:
                with self.backend.device.current():
                    self.backend.device.driver.cuEventSynchronize(self.end)  # the query that follows shows its error
        finally:
            with self.backend.inside(), self.backend.lock:
                self._holders -= 1
                if self.retire():
                    self._let_go()
