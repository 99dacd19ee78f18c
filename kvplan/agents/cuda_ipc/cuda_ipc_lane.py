"""A visitor's transfers of one priority: the stream and words behind them, and the order of their notes."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
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


class _Later:
    """The end of a note that a message tells; or, until ``sent``, of a note whose submit was interrupted."""

    __slots__ = ("_lane", "_number", "_tell", "sent")

    def __init__(self, tell: Tell, lane: int, number: int) -> None:
        self._tell, self._lane, self._number = tell, lane, number
        self.sent = False

    def __call__(self, error: TransferError | None) -> None:
        kind = READY if error is None and self.sent else DROPPED
        self._tell(Message(kind, self._lane, self._number).written())


class _PutOff:
    """A submit of a signal handler within another submit of the same thread; called, the end of its note."""

    __slots__ = ("_lane", "begun", "note", "taken", "transfer")

    def __init__(self, lane: VisitorLane, transfer: Any, note: bytes) -> None:
        self._lane, self.transfer, self.note = lane, transfer, note
        self.taken: list[Deliver] = []
        self.begun = False

    def __call__(self, error: TransferError | None) -> None:
        self._lane.catch_up()
        for deliver in self.taken:
            deliver(error)


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
        self._lock = threading.RLock()  # a signal handler may submit within a submit of the same thread
        self._busy = False  # whether a submit changes the state
        self._put_off: deque[_PutOff] = deque()  # submits of handlers, which the interrupted submit completes
        self._made_in = generation()
        self._stream = self._gate_stream = 0
        self._gates: list[int] = []  # events, and those of them that no call uses
        self._free: list[int] = []
        try:
            with device.current():
                self._stream, self._gate_stream = device.stream(urgent=True), device.stream(urgent=True)
                self._gates.append(device.event())
                self._free.append(self._gates[0])
        except BaseException:
            self.close()
            raise

    def ordered(self, transfer: Any, note: bytes, taken: list[Deliver]) -> None:
        """Let the stream wait for a transfer, then count it and write the note's number.

        A signal handler may raise an error at any point, or submit. The note is then delivered once or never, and later
        notes are delivered.

        Args:
            transfer: the executor's transfer.
            note: the note, or ``b""``.
            taken: if there is a note, a function is put in, to be called when the transfer has ended.
        """
        with self._lock:  # several threads may submit
            if not self._stream:
                return
            if self._busy:
                self._later_on(transfer, note, taken)
                return
            try:
                self._busy = True
                self._order(transfer, note, taken)
            finally:
                self._busy = False
                if self._put_off:
                    self.catch_up()

    def _later_on(self, transfer: Any, note: bytes, taken: list[Deliver]) -> None:
        """Leave a submit to the call that it interrupts, which has done a part of its work."""
        entry = _PutOff(self, transfer, note)
        if note:
            taken.append(entry)
        self._put_off.append(entry)

    def catch_up(self) -> None:
        """Complete the submits that were put off."""
        with self._lock:
            while self._put_off and not self._busy:
                entry = self._put_off[0]
                try:
                    self._busy = True
                    if not entry.begun and self._stream:
                        entry.begun = True
                        with suppress(TransferError):  # the owner is gone, and the agent knows
                            self._order(entry.transfer, entry.note, entry.taken)
                finally:
                    self._busy = False
                if self._put_off and self._put_off[0] is entry:
                    self._put_off.popleft()

    def _order(self, transfer: Any, note: bytes, taken: list[Deliver]) -> None:
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
        """Send a note."""
        number = self._notes + 1
        later = _Later(self._tell, self._number, number)
        self._notes = number  # no signal handler runs from here to the end of append
        taken.append(later)
        for message in note_messages(kind, self._number, number, note):
            self._tell(message)
        later.sent = True

    def _issued_now(self, transfer: Any, note: bytes, taken: list[Deliver]) -> None:
        """Let the stream count a transfer, and deliver its note. The device is current."""
        # Counted first: after an error, the next transfer must not take a number that the stream may have written.
        ended = self._issued = self._issued + 1
        words, lane, number = self._words, self._number, self._notes + 1
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
            self._notes = number  # no signal handler runs from the write of the word to the end of append
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
            with self._gate() as gate:
                device.record(gate, theirs)
                device.wait(stream, gate)
            return True
        if is_issued(after):
            after.wait(Waited(stream, device.ordinal))
            return True
        return False

    @contextmanager
    def _gate(self) -> Iterator[int]:
        """Lend an event: another one to a signal handler that submits within a submit."""
        if not self._free:
            self._gates.append(self._device.event())
            self._free.append(self._gates[-1])
        gate = self._free[-1]
        try:
            self._free.remove(gate)
            yield gate
        finally:
            if gate not in self._free:
                self._free.append(gate)

    def drain(self) -> None:
        """Wait until the stream has written the last word. In a child of a fork it does nothing."""
        if not self._stream or not self._gates or self._made_in != generation():
            return
        device = self._device
        with device.current(), Uncaptured(device), suppress(TransferError):  # the GPU may have failed
            for stream in (self._stream, self._gate_stream):
                device.record(self._gates[0], stream)
                device.synchronize(self._gates[0])

    def close(self) -> None:
        """Destroy the streams and the event. In a child of a fork it touches nothing of the GPU."""
        self.drain()
        streams, gates = (self._stream, self._gate_stream), self._gates
        self._stream, self._gate_stream, self._gates, self._free = 0, 0, [], []
        if self._made_in == generation():
            with self._device.current(), Uncaptured(self._device):
                for gate in gates:
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
