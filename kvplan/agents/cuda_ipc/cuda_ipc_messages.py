"""The messages of ``cuda_ipc`` from a visitor to the owner, and the words of the page that both share."""

from __future__ import annotations

from struct import Struct
from typing import NamedTuple

# Words of the shared page. For each lane: the number of the last note whose bytes have arrived, and the number of
# transfers that have ended, which the visitor's stream writes; and that of issued transfers, which its CPU writes.
# For each GPU of the owner: how often work was published, which the owner's CPU writes; and how much of it has ended,
# which the owner's stream writes.
LANES = 2  # transfers of normal and of high priority
ENDED_WORD, ISSUED_WORD = LANES, 2 * LANES
PUBLISHED_WORD = 3 * LANES
MOST_GPUS = 64
PASSED_WORD = PUBLISHED_WORD + MOST_GPUS
# Then, for each lane: the number of the last note that the owner's CPU has taken. And for each lane, slots in which the
# visitor's CPU leaves short notes, so that a submit needs no system call. Note ``n`` is in slot ``n % SLOTS``.
# A slot has the number of its note, the number that the word of ended transfers must have, the bytes of the note, and
# the note. While a slot is empty, no word of ended transfers has its number.
TAKEN_WORD = PASSED_WORD + MOST_GPUS
SLOTS, SLOT_WORDS, SLOT_HEAD_WORDS = 32, 28, 3
SLOTS_WORD = TAKEN_WORD + LANES
SHORT_NBYTES = 8 * (SLOT_WORDS - SLOT_HEAD_WORDS)  # most bytes of a note in a slot
SLOT_HEAD = Struct("=2Q")
NEVER = (1 << 64) - 1
NUMBER_NBYTES = 8
HEAD_NBYTES = 2 + NUMBER_NBYTES

# Kinds of messages. Notes are delivered in the order of their numbers.
NOTE = b"n"  # a note that the lane's word delivers
LATER = b"l"  # a note that a message delivers
READY = b"r"  # the bytes of a note have arrived
DROPPED = b"d"  # a note is not delivered: its transfer failed


class Message(NamedTuple):
    """A message.

    Attributes:
        kind: one of the kinds above.
        lane: number of the lane.
        number: number of the note, from 1.
        rest: bytes of a note.
    """

    kind: bytes
    lane: int
    number: int
    rest: bytes = b""

    def written(self) -> bytes:
        r"""Return the message as bytes.

        >>> Message(NOTE, 1, 7, b"ready").written()
        b'n\x01\x07\x00\x00\x00\x00\x00\x00\x00ready'
        """
        return self.kind + bytes([self.lane]) + self.number.to_bytes(NUMBER_NBYTES, "little") + self.rest


def slot_word(lane: int, number: int) -> int:
    """Return the first word of the slot of a lane's note.

    >>> slot_word(1, 33) - slot_word(0, 1) == SLOTS * SLOT_WORDS
    True
    """
    return SLOTS_WORD + (lane * SLOTS + number % SLOTS) * SLOT_WORDS


def read_message(message: bytes) -> Message:
    """Read a message.

    >>> read_message(Message(READY, 0, 9).written())
    Message(kind=b'r', lane=0, number=9, rest=b'')
    """
    number = int.from_bytes(message[2:HEAD_NBYTES], "little")
    return Message(message[:1], message[1], number, message[HEAD_NBYTES:])
