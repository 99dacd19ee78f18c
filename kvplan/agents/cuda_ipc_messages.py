"""The messages of ``cuda_ipc`` from a visitor to the owner, and the words of the page that both share."""

from __future__ import annotations

from kvplan.errors import LayoutError

NOTE, DROPPED, EVENT = b"n", b"d", b"e"  # a note, with its number; its withdrawal; the handle of an event
# Words of the shared page: the number of the last note whose bytes have arrived, which the visitor's stream writes; and
# how often the owner has recorded its events.
NOTES_WORD, PUBLISHED_WORD = 0, 1
NUMBER_NBYTES = 8
MOST_NOTE = 16 << 10  # bytes of a note; the agent itself sends a longer one
MOST_PENDING = 1 << 16  # notes that wait for their bytes


def written(kind: bytes, number: int, rest: bytes = b"") -> bytes:
    r"""Return a message with a number.

    >>> written(NOTE, 7, b"ready"), numbered(written(NOTE, 7, b"ready"))
    (b'n\x07\x00\x00\x00\x00\x00\x00\x00ready', (7, b'ready'))
    """
    return kind + number.to_bytes(NUMBER_NBYTES, "little") + rest


def numbered(message: bytes) -> tuple[int, bytes]:
    """Return the number of a message, and what follows it.

    Raises:
        LayoutError: the message is too short.
    """
    if len(message) <= NUMBER_NBYTES:
        raise LayoutError(f"a message of {len(message)} bytes came for cuda_ipc; no agent of kvplan sends it")
    return int.from_bytes(message[1 : NUMBER_NBYTES + 1], "little"), message[NUMBER_NBYTES + 1 :]
