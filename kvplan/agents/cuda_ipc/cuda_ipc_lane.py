"""A visitor's transfers of one priority: the stream and words behind them, and the order of their notes."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from kvplan.agents.cuda_ipc.cuda_ipc_messages import (
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
    slot_word,
)
from kvplan.agents.way import Deliver, Tell, delivered
from kvplan.base.process import generation
from kvplan.cuda.device import Device, Uncaptured
from kvplan.cuda.handles import event_handle, stream_handle
from kvplan.cuda.ipc.shared_words import SharedWords
from kvplan.errors import TransferError

WITHIN = "a transfer was submitted within the submit of another one of the same thread"


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
        self._ended_at = (words.address(ENDED_WORD + number),)
        self._issued_word, self._taken_word = ISSUED_WORD + number, TAKEN_WORD + number
        self._notes = self._issued = 0
        self._submitting = False
        self._lock = threading.RLock()
        self._made_in = generation()
        self._stream = self._gate_stream = self._gate = 0
        try:
            with device.current():
                self._stream, self._gate_stream = device.stream(urgent=True), device.stream(urgent=True)
                self._gate = device.event()
        except BaseException:
            self.close()
            raise

    def ordered(self, transfer: Any, note: bytes, taken: list[Deliver]) -> None:
        """Let the stream wait for a transfer, then count it and write the note's number.

        If Ctrl-C comes meanwhile, the note may be lost; later notes are delivered.

        Args:
            transfer: the executor's transfer.
            note: the note, or ``b""``.
            taken: if there is a note, a function is put in, to be called when the transfer has ended.

        Raises:
            TransferError: it is called within itself.
        """
        with self._lock:  # several threads may submit
            if self._submitting:  # this thread
                raise TransferError(WITHIN)
            before = self._notes
            self._submitting = True
            try:
                if self._stream:
                    self._order(transfer, note, taken)
            except BaseException:  # later notes must not wait for this one
                if self._notes > before:
                    self._tell(Message(DROPPED, self._number, self._notes).written())
                raise
            finally:
                self._submitting = False

    def _order(self, transfer: Any, note: bytes, taken: list[Deliver]) -> None:
        self._notes += bool(note)
        if not getattr(transfer, "ordered", False):  # as is_issued(transfer), in a call less
            if note:
                self._send(LATER, note, taken)
            return
        device = self._device
        if device.is_current():  # as in most submits; then there is nothing to restore
            self._issued_now(transfer, note, taken)
        else:
            with device.current():
                self._issued_now(transfer, note, taken)

    def _send(self, kind: bytes, note: bytes, taken: list[Deliver]) -> None:
        """Send the note of the latest number."""
        number = self._notes

        def deliver(error: TransferError | None) -> None:
            self._tell(Message(READY if error is None else DROPPED, self._number, number).written())

        taken.append(deliver)
        self._tell(Message(kind, self._number, number, note).written())

    def _issued_now(self, transfer: Any, note: bytes, taken: list[Deliver]) -> None:
        """Let the stream count a transfer, and deliver its note. The device is current."""
        # Counted first: after an error, the next transfer must not take a number that the stream may have written.
        ended = self._issued = self._issued + 1
        words, lane, number = self._words, self._number, self._notes
        addresses: tuple[int, ...] = self._ended_at
        values: tuple[int, ...] = (ended,)
        slot = 0
        if note:
            nbytes = len(note)
            if nbytes <= SHORT_NBYTES and number - words.load(self._taken_word) <= SLOTS:
                slot = slot_word(lane, number)
                words.put(slot + 1, SLOT_HEAD.pack(ended, nbytes) + note)
            else:
                addresses, values = (*addresses, words.address(lane)), (ended, number)
        try:
            transfer.write_behind(self._stream, addresses, values)
        except TransferError:  # the transfer has failed, and the agent tells its error
            if note:
                self._send(LATER, note, taken)
            return
        words.store(self._issued_word, ended)
        if slot:
            words.store(slot, number)  # last: the other side looks at it first
            taken.append(delivered)
        elif note:
            self._send(NOTE, note, taken)
            taken[0] = delivered

    def gated(self, after: Any, waits: Sequence[tuple[int, int]]) -> Waited | None:
        """Return a stream that waits for an ``after=`` and for words; None if no stream can wait for the ``after=``.

        Args:
            after: the user's ``after=``, or None.
            waits: words and the numbers that they must have.
        """
        device = self._device
        with self._lock:  # several threads may submit, and they share the event
            if self._submitting:  # this thread
                raise TransferError(WITHIN)
            self._submitting = True
            try:
                with device.current():
                    if not self._wait_for(after):
                        return None
                    for word, number in waits:
                        self._words.wait(device, self._gate_stream, word, number)
            finally:
                self._submitting = False
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
