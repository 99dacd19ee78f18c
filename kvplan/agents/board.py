"""The memory that a visitor and an owner share, and by which their GPUs wait for each other: no CPU waits for either.

Each count is a word. The visitor's GPU counts transfers that have ended, behind their last byte, and the owner's GPU
counts published work that has ended, so that no CPU takes part. What a process that dies owes, the other one writes.

Notes lie in a ring. The visitor writes a note when its GPU will count the end of the transfer, or when the transfer has
ended. The owner reads it when the counts have reached what the note needs.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Collection, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from struct import Struct
from typing import Any, NamedTuple

from kvplan.base.values import listed
from kvplan.cuda.device import Device, Uncaptured
from kvplan.cuda.handles import event_handle, stream_handle
from kvplan.cuda.shared_words import PAGE, RELEASED, WORD, SharedWords
from kvplan.errors import KVPlanError, TransferError

# Words. For each lane, transfers that have ended (the visitor's stream) and that were issued (its CPU); for each GPU of
# the owner, by its number there, published work (the owner's CPU) and how much of it has ended (its stream). Then the
# bytes of the ring that were written, and read; and which of the owner's streams need the board no more.
LANES = 2  # transfers of normal and of high priority
ENDED, ISSUED = 0, LANES
MOST_GPUS = 64
PUBLISHED = 2 * LANES
PASSED = PUBLISHED + MOST_GPUS
WRITTEN = PASSED + MOST_GPUS
READ = WRITTEN + 1
LEFT = READ + 1  # two for each GPU

NOTE_NBYTES = 60_000  # most bytes of a note
RING_NBYTES = 64 << 20  # what is not written takes no memory
BOARD_NBYTES = PAGE + RING_NBYTES
_RING = PAGE // WORD  # the first word of the ring
_PART_NBYTES = 1 << 20  # of the ring, whose memory is given back once it was read
_HEAD = Struct(f"<iI{LANES}Q")  # bytes of the note, its sequence, and the counts that it needs
_REST_IS_EMPTY = -1  # in place of the bytes of a note: the next one is at the front of the ring

# Notes of a sequence are read in the order in which they were written: those of a direction and a priority, and those
# that are sent alone.
SEQUENCES = 2 * LANES + 1
ALONE = SEQUENCES - 1

WITHIN = "a transfer was submitted within the submit of another one of the same thread"
LOOK_SECONDS = 1e-4  # between two looks for the end of published work


def checked_note(note: object) -> bytes:
    """Return a note; raise KVPlanError if it is not bytes, or is too long."""
    if not isinstance(note, bytes):
        raise KVPlanError(f"note is a {type(note).__name__}; give bytes")
    if len(note) > NOTE_NBYTES:
        raise KVPlanError(f"note has {len(note):,} bytes; a note has at most {NOTE_NBYTES:,}")
    return note


def _padded(nbytes: int) -> int:
    return _HEAD.size + -(-nbytes // WORD) * WORD


class NoteWriter:
    """The visitor's end of the ring.

    Args:
        words: the board.
        owner: name of the owner, for messages.

    >>> with SharedWords(BOARD_NBYTES) as words:
    ...     NoteWriter(words, "owner").write(b"seven", needs=(0, 7))
    ...     reader = NoteReader(words)
    ...     reader.arrived(), words.store(ENDED + 1, 7), reader.arrived()
    ([], None, [b'seven'])
    """

    def __init__(self, words: SharedWords, owner: str) -> None:
        self._words, self._owner = words, owner
        self._lock = threading.RLock()

    def check_room(self) -> None:
        """Raise TransferError if the owner has not read so many notes that another one may not fit."""
        unread = self._words.load(WRITTEN) - self._words.load(READ)
        if unread + 2 * _padded(NOTE_NBYTES) > RING_NBYTES:
            raise TransferError(f"{unread:,} bytes of notes wait for {self._owner!r}, which does not read them")

    def write(self, note: bytes, sequence: int = ALONE, needs: Sequence[int] = (0,) * LANES) -> None:
        """Write a note.

        Args:
            note: at most :data:`NOTE_NBYTES` bytes.
            sequence: number of its sequence.
            needs: for each lane, the number of transfers that have ended before the note is read.

        Raises:
            TransferError: the ring is full.
        """
        words = self._words
        with self._lock:
            self.check_room()
            written = words.load(WRITTEN)
            at, nbytes = written % RING_NBYTES, _padded(len(note))
            if at + nbytes + _HEAD.size > RING_NBYTES:
                words.put(_RING + at // WORD, _HEAD.pack(_REST_IS_EMPTY, 0, *(0,) * LANES))
                written += RING_NBYTES - at
                at = 0
            words.put(_RING + at // WORD, _HEAD.pack(len(note), sequence, *needs) + note)
            words.store(WRITTEN, written + nbytes)  # last: the owner looks at it first


class _Note(NamedTuple):
    at: int  # bytes that were written before it
    needs: Sequence[int]
    content: bytes


class NoteReader:
    """The owner's end of the ring.

    Args:
        words: the board.
    """

    def __init__(self, words: SharedWords) -> None:
        self._words = words
        self._waiting: list[deque[_Note]] = [deque() for _ in range(SEQUENCES)]
        self._lock = threading.RLock()

    def arrived(self) -> list[bytes]:
        """Return the notes whose counts have been reached since the last call, in the order of the ring."""
        with self._lock:
            self._read()
            ended = [self._words.load(ENDED + lane) for lane in range(LANES)]
            ready = list[_Note]()
            for notes in self._waiting:
                while notes and all(count >= need for count, need in zip(ended, notes[0].needs, strict=True)):
                    ready.append(notes.popleft())
            return [note.content for note in sorted(ready)]

    def _read(self) -> None:
        words = self._words
        begun, end = words.load(READ), words.load(WRITTEN)
        at, notes = begun, list[tuple[int, _Note]]()
        while at < end:
            word = _RING + at % RING_NBYTES // WORD
            nbytes, sequence, *needs = _HEAD.unpack(words.get(word, _HEAD.size))
            if nbytes == _REST_IS_EMPTY:
                at += RING_NBYTES - at % RING_NBYTES
                continue
            content = words.get(word + _HEAD.size // WORD, nbytes)
            notes.append((sequence, _Note(at, needs, content)))
            at += _padded(nbytes)
        for part in range(begun // _PART_NBYTES, end // _PART_NBYTES):
            words.discard(PAGE + part * _PART_NBYTES % RING_NBYTES, _PART_NBYTES)
        words.store(READ, end)  # before the notes are kept: none comes twice if an interrupt comes here
        for sequence, note in notes:
            self._waiting[sequence].append(note)


class _Streams:
    """Streams of high priority, and an event to record on them.

    Args:
        device: the GPU.
        count: number of streams.

    Attributes:
        device: as given.
        handles: the driver's handles of the streams; none after :meth:`close`.
        event: that of the event.

    Raises:
        TransferError: the driver cannot make a stream or an event.
    """

    def __init__(self, device: Device, count: int) -> None:
        self.device, self.event = device, 0
        self.handles: list[int] = []
        try:
            with device.current(), Uncaptured(device):
                for _ in range(count):
                    self.handles.append(device.stream(urgent=True))
                self.event = device.event()
        except BaseException:
            self.close()
            raise

    def order(self, first: int, second: int, user: int) -> None:
        """Let a stream wait for another one; one of them is the user's."""
        device = self.device
        with device.current():
            if device.capturing(user):
                raise KVPlanError("the stream is being captured into a CUDA graph; call this outside of the capture")
            device.record(self.event, first)
            device.wait(second, self.event)

    def close(self) -> None:
        """Wait until the streams are idle, and destroy all."""
        device, handles, event = self.device, self.handles, self.event
        self.handles, self.event = [], 0
        with device.current(), Uncaptured(device):
            for stream in handles:
                if event:
                    with suppress(TransferError):  # the GPU may have failed
                        device.record(event, stream)
                        device.synchronize(event)
                device.driver.cuStreamDestroy_v2(stream)
            if event:
                device.driver.cuEventDestroy_v2(event)


# ---- the owner -----------------------------------------------------------------------------------------------------


class OwnerOrder:
    """The streams of an owner that wait for its visitors, and for which they wait; with the board of each visitor.

    Each GPU has two, so that an order holds for work of any of the user's streams: the one behind all work that was
    published, and the one behind visitors' transfers.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._streams: dict[int, _Streams] = {}  # by GPU
        self._published: dict[int, int] = {}  # how often work was published, by GPU
        self._boards: list[SharedWords] = []
        self._retired: list[tuple[SharedWords, list[int]]] = []  # with the words that streams write once they are done

    def publish(self, stream: Any, gpus: Collection[int]) -> None:
        """Let transfers that visitors submit from now on wait for the work that was issued on a stream so far.

        Args:
            stream: a stream of the user.
            gpus: numbers of the GPUs whose memory is offered.

        Raises:
            KVPlanError: it is no stream, or of another GPU.
        """
        with self._lock:
            streams, handle = self._streams_of(stream, gpus)
            streams.order(handle, streams.handles[0], handle)
            gpu = streams.device.ordinal
            self._published[gpu] = self._published.get(gpu, 0) + 1
            for board in self._boards:
                self._tell(board, gpu)

    def wait_for_visitors(self, stream: Any, gpus: Collection[int]) -> None:
        """Let later work on a stream wait for the transfers that visitors have issued so far; see :meth:`publish`."""
        with self._lock:
            streams, handle = self._streams_of(stream, gpus)
            device, behind = streams.device, streams.handles[1]
            for board in self._boards:
                for lane in range(LANES):
                    issued = min(board.load(ISSUED + lane), RELEASED)
                    if board.load(ENDED + lane) < issued:
                        board.pin(device)
                        with device.current():
                            board.wait(device, behind, ENDED + lane, issued)
            streams.order(behind, handle, handle)

    def enter(self, board: SharedWords) -> None:
        """Take the board of a new visitor, whose transfers wait for all work that was published."""
        with self._lock:
            self._boards.append(board)
            for gpu in self._published:
                self._tell(board, gpu)

    def leave(self, board: SharedWords) -> None:
        """Close the board of a visitor that has gone, once no stream needs it; never block."""
        with self._lock:
            if board in self._boards:
                self._boards.remove(board)
            words: list[int] = []
            for gpu, streams in self._streams.items() if board.pinned else ():
                with streams.device.current(), Uncaptured(streams.device):
                    for k, stream in enumerate(streams.handles):
                        words.append(LEFT + 2 * gpu + k)
                        board.write(streams.device, stream, words[-1], 1)
            self._retired.append((board, words))
            for retired in list(self._retired):
                if all(map(retired[0].load, retired[1])):
                    self._retired.remove(retired)
                    retired[0].close()

    def close(self) -> None:
        """Wait until the streams are idle, and close all; no visitor is left."""
        with self._lock:
            for streams in self._streams.values():
                streams.close()
            for board, _ in self._retired:
                board.close()
            self._streams, self._retired = {}, []

    def _tell(self, board: SharedWords, gpu: int) -> None:
        """Let a visitor's next transfers wait for the work that was published on a GPU."""
        device, published = self._streams[gpu].device, self._streams[gpu].handles[0]
        board.pin(device)
        with device.current():
            board.write(device, published, PASSED + gpu, self._published[gpu])
        board.store(PUBLISHED + gpu, self._published[gpu])

    def _streams_of(self, stream: Any, gpus: Collection[int]) -> tuple[_Streams, int]:
        """Return the streams of the GPU of a user's stream, and that stream's handle."""
        handle = stream_handle(stream)
        if handle is None:
            raise KVPlanError(f"stream is a {type(stream).__name__}; give a stream, as torch.cuda.Stream()")
        gpu = getattr(stream, "device_index", min(gpus))
        if gpu not in gpus:
            raise KVPlanError(f"the stream is of cuda:{gpu}; give one of {listed(f'cuda:{k}' for k in sorted(gpus))}")
        if gpu not in self._streams:
            self._streams[gpu] = _Streams(Device(gpu), 2)
        return self._streams[gpu], handle


# ---- the visitor ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Waited:
    """A stream, as ``after=`` and ``wait`` take it."""

    cuda_stream: int
    device_index: int


class VisitorOrder:
    """The streams behind a visitor's transfers, one a lane, and the stream before them.

    Args:
        device: the GPU that runs the kernels.
        board: the board.
        gpus: numbers of the owner's GPUs.

    Raises:
        TransferError: the driver cannot make a stream or an event.
    """

    def __init__(self, device: Device, board: SharedWords, gpus: Sequence[int]) -> None:
        self._device, self._board, self._gpus = device, board, gpus
        self._lock = threading.RLock()  # several threads may submit, and they share the event
        self._counting = False
        self._issued = [0] * LANES
        board.pin(device)
        self._streams = _Streams(device, LANES + 1)  # one a lane, and the stream before all of them

    def count(self, transfer: Any, lane: int) -> int:
        """Let the lane's stream count a transfer that was submitted, behind its end; return its number.

        It returns 0 for a transfer that only the CPU can count: not all of its driver calls have been made, or it has
        failed.

        Raises:
            TransferError: a signal handler submits within a submit.
        """
        if not getattr(transfer, "ordered", False) or not self._streams.handles:
            return 0
        device = self._device
        with self._lock:
            if self._counting:  # by this thread, in a signal handler: a later number must not be written first
                raise TransferError(WITHIN)
            try:
                self._counting = True
                # Counted first: after an error, the next transfer must not take a number that the stream may have
                # written.
                number = self._issued[lane] = self._issued[lane] + 1
                # In most submits the device is current already; then there is nothing to restore.
                with nullcontext() if device.is_current() else device.current():
                    transfer.write_behind(self._streams.handles[lane], (self._board.address(ENDED + lane),), (number,))
                self._board.store(ISSUED + lane, number)
            except TransferError:  # the agent tells its error
                return 0
            finally:
                self._counting = False
        return number

    def behind_published(self, after: Any) -> Any:
        """Return the ``after=`` to submit with: it waits for the user's, and for the work that the owner published."""
        waits = self._unfinished()
        if not waits:
            return after
        with self._lock, self._device.current():
            gate = self._streams.handles[LANES]
            if self._wait_for(after, gate):
                for word, number in waits:
                    self._board.wait(self._device, gate, word, number)
                return Waited(gate, self._device.ordinal)
        while self._unfinished():  # the CPU waits for ``after`` anyway
            time.sleep(LOOK_SECONDS)
        return after

    def _unfinished(self) -> list[tuple[int, int]]:
        """Return the words of published work that has not ended, each with the number that it will have."""
        board, words = self._board, list[tuple[int, int]]()
        for gpu in self._gpus:
            number = board.load(PUBLISHED + gpu)
            if board.load(PASSED + gpu) < number <= RELEASED:
                words.append((PASSED + gpu, number))
        return words

    def _wait_for(self, after: Any, stream: int) -> bool:
        """Let a stream wait for an ``after=``; return whether it can."""
        device, handle, theirs = self._device, event_handle(after), stream_handle(after)
        if handle is not None:
            if handle:
                device.wait(stream, handle)
        elif theirs is not None and getattr(after, "device_index", device.ordinal) == device.ordinal:
            device.record(self._streams.event, theirs)
            device.wait(stream, self._streams.event)
        elif getattr(after, "ordered", False):  # all driver calls of a transfer have been made, and it is in no graph
            after.wait(Waited(stream, device.ordinal))
        else:
            return after is None
        return True

    def release(self) -> None:
        """Let transfers go on that wait for work of the owner, which has died."""
        for gpu in self._gpus:
            self._board.store(PASSED + gpu, RELEASED)

    def close(self) -> None:
        """Wait until the streams are idle, and destroy them."""
        self.release()  # a submit that failed may have left a wait, and no transfer is in flight
        self._streams.close()
