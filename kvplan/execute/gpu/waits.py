"""Waits: of a transfer for ``after=`` and for the issue of others, and of streams and threads for its end."""

from __future__ import annotations

import time
from abc import abstractmethod
from typing import Any

from kvplan.base.latch import Latch, Wake, sleep
from kvplan.base.process import check_process
from kvplan.cuda.handles import current_stream, event_handle, stream_handle
from kvplan.errors import KVPlanError, TransferError
from kvplan.execute.gpu.resources import Resources
from kvplan.execute.transfer import Transfer, check_layer
from kvplan.plan.layers import Layers


class Awaited(Transfer):
    """The side of a GPU's transfer that others wait for; it changes nothing of the transfer."""

    resources: Resources
    captures: list[Any] | None
    kept: Any
    _issued: Latch | None
    _over: bool
    _end: int
    _error: BaseException | None
    _marks: list[tuple[Layers, int]]

    @abstractmethod
    def event(self) -> int:
        """Borrow an event."""

    @abstractmethod
    def keep(self, after: Any) -> None:
        """Keep what the transfer waits for until its end."""

    @abstractmethod
    def block(self) -> None:
        """Wait for the end on the CPU; the transfer is issued."""

    @property
    def queued(self) -> bool:
        """Whether it waits to be issued by the lane's own thread."""
        return self._issued is not None and not self._issued.is_set()

    def wait(self, stream: Any = None) -> None:
        """See :meth:`Transfer.wait`."""
        self._order(self._stream(stream), None)

    def wait_layer(self, layer: int, stream: Any = None) -> None:
        """See :meth:`Transfer.wait_layer`."""
        number = check_layer(self.plan, layer)
        self._order(self._stream(stream), number)

    def precede(self, stream: int) -> None:
        """Let a stream, by its handle, wait for the end of this transfer."""
        self._order(stream, None)

    def synchronize(self, timeout: float | None = None) -> None:
        """See :meth:`Transfer.synchronize`."""
        started = time.monotonic()
        if not self._over:
            check_process(self.resources.generation)
        if self._issued is not None and not self._issued.wait(timeout):
            raise self._late(timeout)
        if not self._over:
            if timeout is None:
                self.block()
            else:
                while not self.done():
                    if time.monotonic() - started > timeout:
                        raise self._late(timeout)
                    time.sleep(20e-6)
        self._raise_error()

    def _late(self, timeout: float | None) -> TransferError:
        return TransferError(f"transfer of {self.plan.nbytes} bytes has not finished within {timeout} seconds")

    def _stream(self, stream: Any) -> int:
        handle = current_stream(self.resources.device.ordinal) if stream is None else stream_handle(stream)
        if handle is None:
            raise KVPlanError(
                f"stream is a {type(stream).__name__}; give a stream, such as torch.cuda.current_stream()"
            )
        return handle

    def _order(self, stream: int, layer: int | None) -> None:
        resources = self.resources
        check_process(resources.generation)
        if self._issued is not None:
            self._issued.wait()
        with resources.lock:
            self._raise_error()
            if self._over:
                return
            event = self._end
            if layer is not None:
                event = next((mark for layers, mark in self._marks if layer in layers), event)
            if event:
                with resources.device.current():
                    resources.device.wait(stream, event)

    def _raise_error(self) -> None:
        if self._error is not None:
            if isinstance(self._error, KVPlanError):
                raise self._error.with_traceback(None)  # else it would grow by every raise, and hold what they held
            raise TransferError(f"transfer of {self.plan.nbytes} bytes failed: {self._error}") from self._error


Wait = int | Awaited  # an event, or a transfer, whose event may be given back meanwhile


def waits_of(after: Any, transfer: Awaited) -> list[Wait] | None:
    """List what the GPU must wait for before a transfer; None where only the CPU can wait.

    Raises:
        KVPlanError: a transfer that was captured into a graph.
        TransferError: the driver refuses to record an event.
    """
    if after is None:
        return []
    if isinstance(after, Awaited):
        if after.captures is not None:
            raise KVPlanError("after is a transfer captured into a CUDA graph; give the stream that replays it")
        return [after]
    device = transfer.resources.device
    handle = stream_handle(after)
    if handle is not None:
        if getattr(after, "device_index", device.ordinal) != device.ordinal:
            event = after.record_event()  # only its own device can record on it
            transfer.keep(event)
            return [event.cuda_event]
        mine = transfer.event()
        device.record(mine, handle)
        return [mine]
    theirs = event_handle(after)
    if theirs is None:
        return None
    transfer.keep(after)
    return [theirs] if theirs else []  # one never recorded has passed


def recorded(wait: Wait, transfer: Awaited, gate: int) -> Wait:
    """An event of the transfer's own, recorded behind another owner's event as that stands now.

    Args:
        wait: as :func:`waits_of` found it.
        transfer: the transfer that waits.
        gate: a stream that only waits.
    """
    if isinstance(wait, Awaited):
        return wait
    device, event = transfer.resources.device, transfer.event()
    device.wait(gate, wait)
    device.record(event, gate)
    return event


def wait_for_issue(one: Awaited, transfer: Awaited, wake: Wake) -> None:
    """Block a lane's thread until another transfer is issued, or until this one is cancelled."""
    issued = one._issued
    if issued is not None:
        sleep(lambda: issued.is_set() or transfer._over, issued.sleepers, None, wake)
