"""A visitor's transfers of one priority: the stream and words behind them, and the order of their notes."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from kvplan.agents.cuda_ipc.cuda_ipc_messages import (
    BY_MESSAGE,
    DROPPED,
    ENDED_WORD,
    ISSUED_WORD,
    LATER,
    NOTE,
    READY,
    SHORT_NBYTES,
    SLOT_HEAD,
    SLOTS,
    TAKEN_WORD,
    Message,
    note_messages,
    slot_word,
)
from kvplan.agents.way import Deliver, Tell, delivered
from kvplan.base.process import generation
from kvplan.cuda.device import Device
from kvplan.cuda.handles import event_handle, stream_handle
from kvplan.cuda.ipc.shared_words import SharedWords
from kvplan.cuda.scopes import Uncaptured
from kvplan.errors import TransferError


@dataclass(frozen=True, slots=True)
class Waited:
    """A stream, as ``after=`` and ``wait`` take it."""

    cuda_stream: int
    device_index: int


class VisitorLane:
    """The order of transfers of one priority.

    Args:
        device: the GPU that runs the kernels.
        words: the words of both processes, pinned.
        number: number of the lane, and of its words.
        tell: function that sends a message to the owner.

    Raises:
        TransferError: the driver cannot make a stream or an event.
    """

    def __init__(self, device: Device, words: SharedWords, number: int, tell: Tell) -> None:
        self._device, self._words, self._number, self._tell = device, words, number, tell
        self._notes = self._issued = 0
        self._lock = threading.Lock()
        self._made_in = generation()
        self._stream = self._gate_stream = self._gate = 0
        try:
            with device.current():
                self._stream, self._gate_stream = device.stream(urgent=True), device.stream(urgent=True)
                self._gate = device.event()
        except BaseException:
            self.close()
            raise

    def ordered(self, transfer: Any, note: bytes) -> Deliver | None:
        """Let the stream wait for a transfer, then count it and write the note's number.

        Args:
            transfer: the executor's transfer.
            note: the note, or ``b""``.

        Returns:
            None if there is no note. Otherwise a function for the agent, to be called when the transfer has ended.
        """
        with self._lock:  # several threads may submit
            if not self._stream:
                return None
            if not is_issued(transfer):
                return self._later(note) if note else None
            device = self._device
            if device.is_current():  # as in most submits; then there is nothing to restore
                return self._issued_now(transfer, note)
            with device.current():
                return self._issued_now(transfer, note)

    def _later(self, note: bytes) -> Deliver:
        """Send the note of a transfer that is not issued yet; a message delivers it."""
        number = self._notes = self._notes + 1
        for message in note_messages(LATER, self._number, number, note):
            self._tell(message)
        return partial(self._deliver, number)

    def _issued_now(self, transfer: Any, note: bytes) -> Deliver | None:
        """Let the stream count a transfer, and deliver its note. The device is current."""
        # Counted first: after an error, the next transfer must not take a number that the stream may have written.
        ended = self._issued = self._issued + 1
        words, lane = self._words, self._number
        addresses: tuple[int, ...] = (words.address(ENDED_WORD + lane),)
        values: tuple[int, ...] = (ended,)
        number = short = 0
        if note:
            number = self._notes = self._notes + 1
            short = len(note) <= SHORT_NBYTES and number - words.load(TAKEN_WORD + lane) <= SLOTS
            if short:
                slot = slot_word(lane, number)
                words.put(slot + 1, SLOT_HEAD.pack(ended, len(note)) + note)
                words.store(slot, number)  # last: the other side looks at it first
            else:
                for message in note_messages(NOTE, lane, number, note):
                    self._tell(message)
                addresses, values = (*addresses, words.address(lane)), (ended, number)
        try:
            transfer.write_behind(self._stream, addresses, values)
        except TransferError:  # the transfer has failed, and the agent tells its error
            if not note:
                return None
            if short:
                words.store(slot_word(lane, number), 0)
                for message in note_messages(LATER, lane, number, note):
                    self._tell(message)
            else:
                self._tell(Message(BY_MESSAGE, lane, number).written())
            return partial(self._deliver, number)
        words.store(ISSUED_WORD + lane, ended)
        return delivered if note else None

    def _deliver(self, number: int, error: TransferError | None) -> None:
        self._tell(Message(READY if error is None else DROPPED, self._number, number).written())

    def gated(self, after: Any, waits: Sequence[tuple[int, int]]) -> Waited | None:
        """Return a stream that waits for an ``after=`` and for words; None if no stream can wait for the ``after=``.

        Args:
            after: the user's ``after=``, or None.
            waits: words and the numbers that they must have.
        """
        device = self._device
        with self._lock, device.current():  # several threads may submit, and they share the event
            if not self._wait_for(after):
                return None
            for word, number in waits:
                self._words.wait(device, self._gate_stream, word, number)
        return Waited(self._gate_stream, device.ordinal)

    def _wait_for(self, after: Any) -> bool:
        device, stream, handle = self._device, self._gate_stream, event_handle(after)
        if after is None:
            return True
        if handle is not None:
            if handle:
                device.wait(stream, handle)
            return True
        theirs = stream_handle(after)
        if theirs is not None and getattr(after, "device_index", device.ordinal) == device.ordinal:
            device.record(self._gate, theirs)
            device.wait(stream, self._gate)
            return True
        if is_issued(after):
            after.wait(Waited(stream, device.ordinal))
            return True
        return False

    def drain(self) -> None:
        """Wait until the stream has written the last word. In a child of a fork it does nothing."""
        if not self._stream or not self._gate or self._made_in != generation():
            return
        device = self._device
        with device.current(), Uncaptured(device), suppress(TransferError):  # the GPU may have failed
            for stream in (self._stream, self._gate_stream):
                device.record(self._gate, stream)
                device.synchronize(self._gate)

    def close(self) -> None:
        """Destroy the streams and the event. In a child of a fork it touches nothing of the GPU."""
        self.drain()
        streams, gate = (self._stream, self._gate_stream), self._gate
        self._stream = self._gate_stream = self._gate = 0
        if self._made_in == generation():
            with self._device.current(), Uncaptured(self._device):
                if gate:
                    self._device.driver.cuEventDestroy_v2(gate)
                for stream in streams:
                    if stream:
                        self._device.driver.cuStreamDestroy_v2(stream)


def is_issued(transfer: Any) -> bool:
    """Return whether all driver calls of a transfer have been made, and it is in no graph.

    >>> is_issued(object())
    False
    """
    return bool(getattr(transfer, "ordered", False))
