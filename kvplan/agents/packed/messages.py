"""Messages between two ends of packed transfers: notes that begin with :data:`MAGIC`, in little-endian integers.

=========  ====================  =======================================================================================
message    from, to              meaning
=========  ====================  =======================================================================================
HELLO      either, other         where my ring is; nothing that I wrote to you earlier moves any more
PROGRAM    beginner, other end   two layouts, whose program later orders name by a number
ORDER      beginner, other end   begin a transfer from or to me; again: so many chunks of it may travel now
GO         receiver, sender      this free slot is for this chunk; the sender gathers it then
CHUNK      sender, receiver      this chunk is in its slot; the message comes behind the bytes
DONE       receiver, sender      all chunks are in their blocks
FAIL       either, other         why it failed; nothing of it moves here any more. Of the transfer 0: all transfers
WORD       either, other         I live
=========  ====================  =======================================================================================

All but HELLO, CHUNK and WORD are numbered, so that a message that is lost, or comes twice, is an error.
"""

from __future__ import annotations

import json
import logging
import struct
import threading
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvplan.base.quoting import quoted
from kvplan.errors import TransferError
from kvplan.layout.strides import Int64Array

MAGIC = b"kvplan.pack/6"
HELLO, PROGRAM, ORDER, GO, CHUNK, DONE, FAIL, WORD = range(1, 9)
UNNUMBERED = HELLO, CHUNK, WORD

_HEAD = struct.Struct("<13sBQQBQI")  # the magic first
_IDS = struct.Struct("<qBI")  # the lowest, bytes of each, how many
_SLOT = struct.Struct("<I")
_LENGTH = struct.Struct("<I")
_LIFE = struct.Struct("<Q")
MOST_WHY = 1000  # characters of a reason
MOST_UNREAD = 64 << 20  # bytes of the notes of a peer that the user has not taken, as over shared memory
NOTE_NBYTES = 100  # that a note takes beside its content

log = logging.getLogger("kvplan.agents")


class Message(NamedTuple):
    """A message.

    Attributes:
        kind: :data:`HELLO` or another of the kinds.
        life: number of the sender's end of the line.
        sequence: number of the message; 0 for those without one.
        mine: whether its sender has begun the transfer.
        transfer: number of the transfer, or of the program; 0 for none.
        chunk: number of a chunk, or of chunks.
        body: the rest.
    """

    kind: int
    life: int
    sequence: int = 0
    mine: bool = False
    transfer: int = 0
    chunk: int = 0
    body: bytes = b""

    def note(self) -> bytes:
        """Return it as it travels.

        >>> Message.of(Message(GO, 7, 3, True, 5, 2, b"body").note())
        Message(kind=4, life=7, sequence=3, mine=True, transfer=5, chunk=2, body=b'body')
        """
        return _HEAD.pack(MAGIC, *self[:-1]) + self.body

    @classmethod
    def of(cls, note: bytes) -> Message:
        """Read a message; raise TransferError if it cannot be read."""
        try:
            _, kind, life, sequence, mine, transfer, chunk = _HEAD.unpack_from(note)
        except struct.error:
            raise TransferError(f"a message of packed transfers cannot be read: {quoted(note)}") from None
        return cls(kind, life, sequence, bool(mine), transfer, chunk, note[_HEAD.size :])


class Hello(NamedTuple):
    """Where a ring is.

    Attributes:
        answers: the receiver's end of the line, if the sender has heard of it; otherwise 0.
        place: the fields of :class:`kvplan.agents.packed.ring.Place`.
        metadata: what the receiver needs to write there.
    """

    answers: int
    place: Sequence[int | str]
    metadata: bytes

    def body(self) -> bytes:
        """Return it as the body of a message.

        >>> Hello.of(Hello(7, (4096, 8, 1024, "cpu"), b"met").body())
        Hello(answers=7, place=[4096, 8, 1024, 'cpu'], metadata=b'met')
        """
        text = json.dumps(self.place).encode()
        return _LIFE.pack(self.answers) + _LENGTH.pack(len(text)) + text + self.metadata

    @classmethod
    def of(cls, body: bytes) -> Hello:
        """Read the body of a message."""
        (answers,), (length,) = _LIFE.unpack_from(body), _LENGTH.unpack_from(body, _LIFE.size)
        start = _LIFE.size + _LENGTH.size
        return cls(answers, json.loads(body[start : start + length]), body[start + length :])


class Order(NamedTuple):
    """What is ordered.

    Attributes:
        outlines: for each program its number, the units that are skipped on both sides, and the number of units.
        groups: most groups of layers.
        sends: whether the beginner sends.
        urgent: whether it has high priority.
        note: note for the other end's user.
    """

    outlines: Sequence[Sequence[int]]
    groups: int
    sends: bool
    urgent: bool
    note: bytes = b""

    def body(self) -> bytes:
        """Return it as the body of a message.

        >>> Order.of(Order([[1, 0, 2, 64]], 8, True, False, b"note").body())
        Order(outlines=[[1, 0, 2, 64]], groups=8, sends=True, urgent=False, note=b'note')
        """
        text = json.dumps(self[:-1]).encode()
        return _LENGTH.pack(len(text)) + text + self.note

    @classmethod
    def of(cls, body: bytes) -> Order:
        """Read the body of a message."""
        end = _LENGTH.size + _LENGTH.unpack_from(body)[0]
        outlines, groups, sends, urgent = json.loads(body[_LENGTH.size : end])
        return cls(outlines, groups, sends, urgent, body[end:])


def id_bytes(ids: Int64Array) -> bytes:
    """Return block ids with as few bytes for each as they need.

    >>> len(id_bytes(np.arange(1000, 1100))), ids_of(id_bytes(np.array([7, 1 << 40]))).tolist()
    (113, [7, 1099511627776])
    """
    low = int(ids.min()) if ids.size else 0
    span = int(ids.max()) - low if ids.size else 0
    width = next(width for width in (1, 2, 4, 8) if span < 1 << 8 * width)
    return _IDS.pack(low, width, ids.size) + (ids - low).astype(f"<u{width}").tobytes()


def ids_of(body: bytes) -> Int64Array:
    """Return block ids from a message; none from an empty one."""
    if not body:
        return np.empty(0, np.int64)
    low, width, count = _IDS.unpack_from(body)
    ids: Int64Array = np.frombuffer(body, f"<u{width}", count, _IDS.size).astype(np.int64)
    ids += low
    return ids


def go_body(slot: int, ids: bytes) -> bytes:
    """Return the body of a :data:`GO`."""
    return _SLOT.pack(slot) + ids


def read_go(body: bytes) -> tuple[int, bytes]:
    """Return the slot of a :data:`GO`, and the ids."""
    return _SLOT.unpack_from(body)[0], body[_SLOT.size :]


def refusal(life: int, why: str) -> bytes:
    """Return the note that refuses a greeting, or ends a line that is not known.

    >>> read_end(Message.of(refusal(7, "no memory")).body)
    (7, 'no memory')
    """
    return Message(FAIL, 0, body=end_body(life, why)).note()


def end_body(life: int, why: str) -> bytes:
    """Return the body of a :data:`FAIL` of all transfers of a line, which names the receiver's end of it."""
    return _LIFE.pack(life) + why[:MOST_WHY].encode()


def read_end(body: bytes) -> tuple[int, str]:
    """Return the line that has ended, and why."""
    return _LIFE.unpack_from(body)[0], body[_LIFE.size :].decode(errors="replace")


class Inbox:
    """Notes of peers for the user, each with the peer. Of a peer whose notes nobody takes, later ones are dropped.

    >>> inbox = Inbox()
    >>> inbox.append(("decode", b"17")), inbox.take(), inbox.take()
    (None, [('decode', b'17')], [])
    """

    def __init__(self) -> None:
        self._notes: list[tuple[str, bytes]] = []
        self._unread = Counter[str]()  # bytes by peer
        self._lock = threading.Lock()

    def append(self, note: tuple[str, bytes]) -> None:
        """Take a note; drop it with an error in the log if those of its peer have reached :data:`MOST_UNREAD`."""
        peer, content = note
        with self._lock:
            before = self._unread[peer]
            self._unread[peer] += len(content) + NOTE_NBYTES
            if self._unread[peer] <= MOST_UNREAD:
                self._notes.append(note)
            elif before <= MOST_UNREAD:
                log.error("notes of %s are lost: %d MiB of them were not taken by notes()", peer, MOST_UNREAD >> 20)

    def take(self) -> list[tuple[str, bytes]]:
        """Return the notes that have come since the last call."""
        with self._lock:
            notes, self._notes = self._notes, []
            self._unread.clear()
        return notes
