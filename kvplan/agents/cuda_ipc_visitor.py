"""``cuda_ipc``, the visitor's side: memory of another process's GPUs, mapped for the GPU that runs the kernels."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from kvplan.agents.cuda_ipc_messages import DROPPED, EVENT, MOST_NOTE, NOTE, NOTES_WORD, PUBLISHED_WORD, written
from kvplan.agents.way import Mapped, Tell
from kvplan.base.process import generation
from kvplan.base.quoting import quoted
from kvplan.cuda.device import Device
from kvplan.cuda.handles import event_handle, stream_handle
from kvplan.cuda.ipc.exports import HANDLE_NBYTES, Export
from kvplan.cuda.ipc.interprocess_event import InterprocessEvent
from kvplan.cuda.ipc.openings import Opening, opened
from kvplan.cuda.ipc.shared_words import SharedWords
from kvplan.cuda.scopes import Uncaptured
from kvplan.errors import LayoutError, TransferError
from kvplan.plan.plan import Plan

MOST_EVENTS = 64
_HANDLE = re.compile(f"[0-9a-f]{{{2 * HANDLE_NBYTES}}}")


class _Stream(NamedTuple):
    """A stream, as ``after=`` and ``wait`` take it."""

    cuda_stream: int
    device_index: int


class OpenedByCudaIpc:
    """Memory of one owner. See :class:`kvplan.agents.way.Opened`.

    Args:
        device: the GPU that runs the kernels.
        exports: the owner's allocations, from its checked card.
        table: the owner's table, not yet checked.
        descriptors: descriptors of all pieces, then of the shared words; the caller closes them.
        tell: function that sends a message to the owner.

    Raises:
        LayoutError: what the descriptors or handles map is not what the card says.
        PathError, TransferError: the driver refuses.
    """

    def __init__(
        self, device: Device, exports: Sequence[Export], table: Mapping[str, Any], descriptors: Sequence[int],
        tell: Tell,
    ) -> None:  # fmt: skip
        handles = _handles(table)
        self._device = device
        self._tell = tell
        self._openings: list[Opening] = []
        self._events: list[InterprocessEvent] = []
        self._stream = self._gate = 0
        self._behind: InterprocessEvent | None = None  # behind all transfers that were submitted
        self._words: SharedWords | None = None
        self._sent = 0
        self._slow: list[Any] = []  # transfers whose notes the agent itself sends
        self._made_in = generation()
        try:
            self.mapped = self._map(exports, descriptors)
            self._words = SharedWords.opened(os.dup(descriptors[-1]))
            self._words.pin(device)
            self._events += [InterprocessEvent.opened(device, handle) for handle in handles]
            self._behind = InterprocessEvent(device)
            with device.current():
                self._stream, self._gate = device.stream(urgent=True), device.event()
        except BaseException:
            self.close()
            raise
        tell(EVENT + self._behind.handle)

    def _map(self, exports: Sequence[Export], descriptors: Sequence[int]) -> list[Mapped]:
        found, at = list[Mapped](), 0
        for export in exports:
            mine = descriptors[at : at + len(export.pieces)]
            at += len(export.pieces)
            made = opened(self._device, export, partial(_some, mine))
            self._openings.append(made)
            found.append(Mapped(export.address, export.nbytes, made.address, f"cuda:{made.owner}", made))
        return found

    def before(self, plan: Plan, after: Any) -> Any:
        """See :meth:`kvplan.agents.way.Opened.before`. The transfer waits for the work that the owner published."""
        del plan
        words = self._words
        if words is None or not words.load(PUBLISHED_WORD) or all(event.passed() for event in self._events):
            return after
        device, stream = self._device, _Stream(self._stream, self._device.ordinal)
        with device.current():
            if not self._wait_on_stream(after):
                for event in self._events:  # the CPU waits for ``after`` anyway
                    event.synchronize()
                return after
            for event in self._events:
                event.wait(self._stream)
        return stream

    def _wait_on_stream(self, after: Any) -> bool:
        """Let this object's stream wait for ``after``; return whether it can."""
        device, handle = self._device, event_handle(after)
        if after is None:
            return True
        if handle is not None:
            if handle:
                device.wait(self._stream, handle)
            return True
        if stream_handle(after) is not None and getattr(after, "device_index", device.ordinal) == device.ordinal:
            device.record(self._gate, stream_handle(after) or 0)
            device.wait(self._stream, self._gate)
            return True
        if _issued(after):
            after.wait(_Stream(self._stream, device.ordinal))
            return True
        return False

    def after(self, transfer: Any, note: bytes) -> bool:
        """See :meth:`kvplan.agents.way.Opened.after`. A stream writes the note's number behind the last byte."""
        words, device, behind = self._words, self._device, self._behind
        self._slow = [one for one in self._slow if not one.done()]
        if words is None or behind is None or not _issued(transfer) or self._slow or len(note) > MOST_NOTE:
            if note:
                self._slow.append(transfer)  # later notes must not overtake this one
            return False
        number = self._sent + 1
        if note:
            self._sent = number
            self._tell(written(NOTE, number, note))
        try:
            transfer.wait(_Stream(self._stream, device.ordinal))
            with device.current():
                if note:
                    words.write(device, self._stream, NOTES_WORD, number)
                device.record(behind.cuda_event, self._stream)
        except TransferError:  # the transfer has failed, and the agent tells its error
            if note:
                self._tell(written(DROPPED, number))
            return False
        return bool(note)

    def lost(self) -> str | None:
        """See :meth:`kvplan.agents.way.Opened.lost`. The agent's own check is enough."""
        return None

    def heard(self, message: bytes) -> None:
        """See :meth:`kvplan.agents.way.Opened.heard`. An owner sends nothing."""
        raise LayoutError(f"a message of {len(message)} bytes came for cuda_ipc; no agent of kvplan sends it")

    def notes(self) -> list[bytes]:
        """See :meth:`kvplan.agents.way.Opened.notes`."""
        return []

    def release(self) -> None:
        """See :meth:`kvplan.agents.way.Opened.release`."""
        for opening in self._openings:
            opening.close()

    def close(self) -> None:
        """See :meth:`kvplan.agents.way.Opened.close`. In a child of a fork, it touches nothing of the GPU."""
        stream, self._stream = self._stream, 0
        words, self._words = self._words, None
        gate, self._gate = self._gate, 0
        events, self._events, self._behind = [*self._events, self._behind], [], None
        if stream and self._made_in == generation():
            device = self._device
            with device.current(), Uncaptured(device):
                with suppress(TransferError):  # the stream may still have to write a word
                    device.record(gate, stream)
                    device.synchronize(gate)
                device.driver.cuEventDestroy_v2(gate)
                device.driver.cuStreamDestroy_v2(stream)
        for event in events:
            if event is not None:
                event.close()
        if words is not None:
            words.close()
        self.release()


def _some(descriptors: Sequence[int], first: int, last: int) -> Sequence[int]:
    return descriptors[first:last]


def _issued(transfer: Any) -> bool:
    """Return whether all driver calls of a transfer have been made, and it is in no graph."""
    return (
        hasattr(transfer, "queued")
        and not transfer.queued
        and not getattr(transfer, "unplayed", False)
        and getattr(transfer, "captures", None) is None
    )


def _handles(table: Mapping[str, Any]) -> list[bytes]:
    """Return the handles of the owner's events.

    Raises:
        LayoutError: the table is none that an owner sends.
    """
    events = table.get("events")
    if not isinstance(events, dict) or len(events) > MOST_EVENTS or set(table) != {"events"}:
        raise LayoutError(f"the owner's table for cuda_ipc is {quoted(table)}; no agent of kvplan sends it")
    found = []
    for handle in events.values():
        if not isinstance(handle, str) or not _HANDLE.fullmatch(handle):
            raise LayoutError(f"the handle of an owner's event is {quoted(handle)}; it has {HANDLE_NBYTES} bytes")
        found.append(bytes.fromhex(handle))
    return found
