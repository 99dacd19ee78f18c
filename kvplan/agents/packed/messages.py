"""Messages between two ends of packed transfers: notes that begin with :data:`MAGIC`, in little-endian integers.

=======  ====================  =========================================================================================
message  from, to              meaning
=======  ====================  =========================================================================================
HELLO    either, other         where my ring is; nothing that I wrote to you earlier moves any more
ORDER    beginner, other end   begin a transfer from or to me; again: so many chunks of it may travel now
GO       receiver, sender      this free slot is for this chunk; the sender gathers it then
CHUNK    sender, receiver      this chunk is in its slot; the message comes behind the bytes
DONE     receiver, sender      all chunks are in their blocks
FAIL     either, other         why a transfer failed; nothing of it moves here any more
END      either, other         why all transfers failed; nothing of them moves here any more
WORD     either, other         I live
=======  ====================  =========================================================================================

Those of a transfer but CHUNK are numbered, so that a message that is lost, or comes twice, is an error.
"""

from __future__ import annotations

import json
import logging
import struct
import threading
import zlib
from collections import Counter
from typing import Any, NamedTuple

import numpy as np

from kvplan.layout.strides import Int64Array

MAGIC = b"kvplan.pack/7"
HELLO, ORDER, GO, CHUNK, DONE, FAIL, END, WORD = range(1, 9)
NUMBERED = ORDER, GO, DONE, FAIL

_HEAD = struct.Struct("<13sBQQBQII")  # the magic first
_IDS = struct.Struct("<qBI")  # the lowest, bytes of each, how many
_LENGTH = struct.Struct("<I")
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
        transfer: number of the transfer. Of HELLO and END: the receiver's end of the line, or 0 if it is not known.
        chunk: number of a chunk, or of chunks. Of END: whether no answer is wanted.
        slot: number of a slot.
        body: the rest.
    """

    kind: int
    life: int
    sequence: int = 0
    mine: bool = False
    transfer: int = 0
    chunk: int = 0
    slot: int = 0
    body: bytes = b""

    def note(self) -> bytes:
        """Return it as it travels.

        >>> Message.of(Message(GO, 7, 3, True, 5, 2, 9, b"body").note())
        Message(kind=3, life=7, sequence=3, mine=True, transfer=5, chunk=2, slot=9, body=b'body')
        """
        return _HEAD.pack(MAGIC, *self[:-1]) + self.body

    @classmethod
    def of(cls, note: bytes) -> Message:
        """Read a message."""
        _, kind, life, sequence, mine, transfer, chunk, slot = _HEAD.unpack_from(note)
        return cls(kind, life, sequence, bool(mine), transfer, chunk, slot, note[_HEAD.size :])


def body_of(fields: Any, rest: bytes) -> bytes:
    """Return values that JSON can write, and more bytes, as the body of a message.

    >>> fields_of(body_of([4096, "cpu"], b"more"))
    ([4096, 'cpu'], b'more')
    """
    text = zlib.compress(json.dumps(fields).encode(), 1)
    return _LENGTH.pack(len(text)) + text + rest


def fields_of(body: bytes) -> tuple[Any, bytes]:
    """Return what :func:`body_of` wrote."""
    end = _LENGTH.size + _LENGTH.unpack_from(body)[0]
    return json.loads(zlib.decompress(body[_LENGTH.size : end])), body[end:]


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
    """Return block ids from a message."""
    low, width, count = _IDS.unpack_from(body)
    ids: Int64Array = np.frombuffer(body, f"<u{width}", count, _IDS.size).astype(np.int64)
    ids += low
    return ids


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
