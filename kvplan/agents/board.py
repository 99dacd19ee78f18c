"""The memory that a visitor and an owner share: counts of transfers and of published work, and the visitor's notes.

Each count is a word. The visitor's GPU counts transfers that have ended, behind their last byte, and the owner's GPU
counts published work that has ended, so that no CPU takes part. What a process that dies owes, the other one writes.

Notes lie in a ring. The visitor writes a note when its GPU will count the end of the transfer, or when the transfer has
ended. The owner reads it when the counts have reached what the note needs.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from struct import Struct
from typing import NamedTuple

from kvplan.cuda.shared_words import PAGE, WORD, SharedWords
from kvplan.errors import TransferError

# Words. For each lane, transfers that have ended (the visitor's stream) and that were issued (its CPU); for each GPU of
# the owner, by its number there, published work (the owner's CPU) and how much of it has ended (its stream). Then the
# bytes of the ring that were written, and read.
LANES = 2  # transfers of normal and of high priority
ENDED, ISSUED = 0, LANES
MOST_GPUS = 64
PUBLISHED = 2 * LANES
PASSED = PUBLISHED + MOST_GPUS
WRITTEN = PASSED + MOST_GPUS
READ = WRITTEN + 1

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
    needs: tuple[int, ...]
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
            notes.append((sequence, _Note(at, tuple(needs), words.get(word + _HEAD.size // WORD, nbytes))))
            at += _padded(nbytes)
        for part in range(begun // _PART_NBYTES, end // _PART_NBYTES):
            words.discard(PAGE + part * _PART_NBYTES % RING_NBYTES, _PART_NBYTES)
        words.store(READ, end)
        for sequence, note in notes:
            self._waiting[sequence].append(note)
