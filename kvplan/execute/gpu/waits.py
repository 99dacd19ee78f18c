"""Waits: a transfer waits for ``after=`` and other transfers; streams and threads wait for the transfer's end."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

from kvplan.base.latch import Latch, Wake, sleep
from kvplan.base.process import check_process
from kvplan.cuda.call_list import ENDED, FAILED, LAST_ROW, PLAYED
from kvplan.cuda.handles import current_stream, event_handle, stream_handle
from kvplan.cuda.reach import gpus_of
from kvplan.errors import KVPlanError, TransferError
from kvplan.execute.gpu.resources import Resources
from kvplan.execute.transfer import Transfer, check_layer
from kvplan.layout.strides import Int64Array
from kvplan.plan.layers import Layers


class Mark(NamedTuple):
    """The event behind the bytes of a group of layers.

    Attributes:
        layers: global numbers of the layers.
        event: the event.
        rows: rows of the transfer's list of calls up to the event's record.
    """

    layers: Layers
    event: int
    rows: int


class Awaited(Transfer):
    """The methods of a GPU's transfer by which streams and threads wait for its end. They do not change its state."""

    resources: Resources
    kept: Any
    _issued: Latch | None
    _over: bool
    _end: int
    _error: BaseException | None
    _marks: list[Mark]
    _state: Int64Array | None

    @abstractmethod
    def event(self) -> int:
        """Borrow an event."""

    @abstractmethod
    def keep(self, after: Any) -> None:
        """Keep the ``after=`` object until the transfer ends."""

    @abstractmethod
    def block(self) -> None:
        """Block the CPU until the transfer ends. It is issued."""

    @abstractmethod
    def _is_played(self) -> bool:
        """Return whether its calls have been made; if one has failed, note it. The executor's lock is held."""

    @property
    def unplayed(self) -> bool:
        """Return whether a thread without the interpreter still makes its calls."""
        state = self._state
        return state is not None and not state[ENDED]

    @property
    def queued(self) -> bool:
        """Return whether the lane's own thread still has to issue it."""
        return self._issued is not None and not self._issued.is_set()

    def wait(self, stream: Any = None) -> None:
        """See :meth:`Transfer.wait`."""
        self._order(self._streams(stream), None)

    def wait_layer(self, layer: int, stream: Any = None) -> None:
        """See :meth:`Transfer.wait_layer`."""
        number = check_layer(self.plan, layer)
        self._order(self._streams(stream), number)

    def precede(self, stream: int) -> None:
        """Let the stream with this handle wait for the end of this transfer."""
        self._order([(stream, self.resources.device.ordinal)], None)

    def write_behind(self, stream: int, addresses: tuple[int, ...], values: tuple[int, ...]) -> None:
        """Let a stream of its GPU wait for its end, and then write words. It is issued; the device is current."""
        resources = self.resources
        with resources.lock:
            if self._error is not None:
                self._raise_error()
            resources.device.write_behind(0 if self._over else self._end, stream, addresses, values)

    @property
    def ordered(self) -> bool:
        """Return whether all its driver calls have been made: streams can wait at once."""
        issued, state = self._issued, self._state
        return (issued is None or issued.is_set()) and (state is None or bool(state[ENDED]))

    def synchronize(self, timeout: float | None = None) -> None:
        """See :meth:`Transfer.synchronize`."""
        started = time.monotonic()
        if not self._over:
            check_process(self.resources.generation)
        if self._issued is not None and not self._issued.wait(timeout):
            raise self._late(timeout)
        if not self._await_rows(LAST_ROW, timeout, started, hurry=False):
            raise self._late(timeout)
        self._notice()  # otherwise the end of a transfer whose list has failed may not be recorded yet
        if not self._over:
            if timeout is None:
                self.block()
            else:
                while not self.done():
                    if time.monotonic() - started > timeout:
                        raise self._late(timeout)
                    time.sleep(20e-6)
        self._raise_error()

    def await_issue(self) -> None:
        """See :meth:`Transfer.await_issue`."""
        check_process(self.resources.generation)
        if self._issued is not None:
            self._issued.wait()
        self._await_rows(LAST_ROW)
        self._notice()
        self._raise_error()

    def _notice(self) -> None:
        """If a call of its list has failed, note the error."""
        state = self._state
        if state is not None and state[FAILED] and not self._over:
            with self.resources.device.current(), self.resources.lock:
                self._is_played()

    def _await_rows(
        self, rows: int, timeout: float | None = None, started: float = 0.0, *, hurry: bool = True
    ) -> bool:  # fmt: skip
        """Block until rows of its list have been played, or it has ended or failed; return False after a timeout.

        If ``hurry``, they are played without waiting for the GPU: a stream shall wait for what they record.
        """
        state = self._state
        if state is None or state[ENDED] or state[FAILED] or state[PLAYED] >= rows:
            return True
        while not self.resources.device.watch(state, rows, hurry=hurry):
            if timeout is not None and time.monotonic() - started > timeout:
                return False
        return True

    def _late(self, timeout: float | None) -> TransferError:
        return TransferError(f"transfer of {self.plan.nbytes} bytes has not finished within {timeout} seconds")

    def _streams(self, stream: Any) -> list[tuple[int, int]]:
        """Return handle and GPU of a caller's stream; of None, of torch's current streams on all GPUs of the plan."""
        here = self.resources.device.ordinal
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
        resources = self.resources
        device = resources.device
        check_process(resources.generation)
        if self._issued is not None:
            self._issued.wait()
        mark = None if layer is None else next((one for one in self._marks if layer in one.layers), None)
        self._await_rows(LAST_ROW if mark is None else mark.rows)
        self._notice()
        with resources.lock:
            self._raise_error()
            if self._over:
                return
            event = self._end if mark is None else mark.event
            for stream, ordinal in streams if event else ():
                # Default streams have the same handle on every GPU: the current GPU decides which one is meant.
                with (device if ordinal == device.ordinal else device.beside(ordinal)).current():
                    device.wait(stream, event)

    def _raise_error(self) -> None:
        if self._error is not None:
            if isinstance(self._error, KVPlanError):
                raise self._error.with_traceback(None)  # otherwise each raise adds frames, which keep objects alive
            raise TransferError(f"transfer of {self.plan.nbytes} bytes failed: {self._error}") from self._error


Wait = int | Awaited  # an event; or a transfer, since its event may be given back before the wait


def waits_of(after: Any, transfer: Awaited) -> list[Wait] | None:
    """Return the events and transfers that ``after`` stands for; None if only the CPU can wait for it.

    Raises:
        TransferError: the driver cannot record an event.
    """
    if after is None:
        return []
    if isinstance(after, Awaited):
        return [after]
    device = transfer.resources.device
    handle = stream_handle(after)
    if handle is not None:
        if getattr(after, "device_index", device.ordinal) != device.ordinal:
            event = after.record_event()  # only the stream's own device can record on it
            transfer.keep(event)
            return [event.cuda_event]
        mine = transfer.event()
        device.record(mine, handle)
        return [mine]
    theirs = event_handle(after)
    if theirs is None:
        return None
    transfer.keep(after)
    return [theirs] if theirs else []  # an event that was never recorded counts as passed


def recorded(event: int, transfer: Awaited, gate: int) -> int:
    """Record an event of the transfer behind another owner's event as recorded now.

    Args:
        event: the other owner's event.
        transfer: the transfer that waits.
        gate: the stream on which the event is recorded.
    """
    device, mine = transfer.resources.device, transfer.event()
    device.wait(gate, event)
    device.record(mine, gate)
    return mine


def wait_for_issue(one: Awaited, transfer: Awaited, wake: Wake) -> None:
    """Block a lane's thread until another transfer is issued, or until this one is cancelled."""
    issued = one._issued
    if issued is not None:
        sleep(lambda: issued.is_set() or transfer._over, issued.sleepers, None, wake)
