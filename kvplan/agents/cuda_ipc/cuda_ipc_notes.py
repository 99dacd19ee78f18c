"""Notes of one visitor that wait, in the owner, for the last byte of their transfers."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from kvplan.agents.channel import NOTE_NBYTES
from kvplan.agents.cuda_ipc.cuda_ipc_messages import (
    BY_MESSAGE,
    DROPPED,
    LANES,
    LATER,
    MORE,
    MOST_PENDING,
    MOST_PENDING_NBYTES,
    NOTE,
    Message,
    refused,
)
from kvplan.cuda.ipc.shared_words import SharedWords


@dataclass(slots=True)
class _Pending:
    """A note.

    Attributes:
        number: number of the note.
        note: its bytes; None if its transfer failed.
        by_word: whether the lane's word delivers it.
        ready: whether a message has delivered it.
    """

    number: int
    note: bytes | None
    by_word: bool
    ready: bool = False


class PendingNotes:
    """The notes of a visitor, each delivered once, and in the order of the submits of its priority.

    Args:
        words: the words that the visitor's streams write.
    """

    def __init__(self, words: SharedWords) -> None:
        self._words = words
        self._lanes: list[deque[_Pending]] = [deque() for _ in range(LANES)]
        self._begun = [b""] * LANES  # the first bytes of each lane's next note
        self._last = [0] * LANES
        self._nbytes = 0

    def take(self, message: Message) -> None:
        """Take a message about a note.

        Raises:
            LayoutError: it contradicts earlier ones, or too many notes wait.
        """
        if message.kind in (MORE, NOTE, LATER):
            self._add(message)
            return
        lane, number = self._lanes[message.lane], message.number
        found = lane[-1] if lane and lane[-1].number == number else next((o for o in lane if o.number == number), None)
        if found is None:
            raise refused(message.written())
        if message.kind == BY_MESSAGE:
            found.by_word = False
        else:
            found.ready = True
            found.by_word = False
            if message.kind == DROPPED:
                self._nbytes -= len(found.note or b"")
                found.note = None

    def _add(self, message: Message) -> None:
        """Add a note, or keep its first bytes."""
        lane, number = message.lane, message.number
        note = self._begun[lane] + message.rest
        if (
            number != self._last[lane] + 1
            or len(note) > NOTE_NBYTES
            or sum(map(len, self._lanes)) >= MOST_PENDING
            or self._nbytes > MOST_PENDING_NBYTES
        ):
            raise refused(message.written())
        if message.kind == MORE:
            self._begun[lane] = note
            return
        self._begun[lane], self._last[lane] = b"", number
        self._nbytes += len(note)
        self._lanes[lane].append(_Pending(number, note, message.kind == NOTE))

    def arrived(self) -> list[bytes]:
        """Return the notes whose bytes have arrived since the last call; never block."""
        found: list[bytes] = []
        for k, lane in enumerate(self._lanes):
            if not lane:
                continue
            word = self._words.load(k)
            while lane and (lane[0].number <= word if lane[0].by_word else lane[0].ready):
                note = lane.popleft().note
                if note is not None:
                    self._nbytes -= len(note)
                    found.append(note)
        return found
