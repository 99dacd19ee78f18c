"""Notes of one visitor that wait, in the owner, for the last byte of their transfers."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from kvplan.agents.channel import NOTE_NBYTES
from kvplan.agents.cuda_ipc.cuda_ipc_messages import (
    DROPPED,
    ENDED_WORD,
    LANES,
    LATER,
    MORE,
    MOST_PENDING,
    MOST_PENDING_NBYTES,
    NEVER,
    NOTE,
    SHORT_NBYTES,
    SLOT_HEAD,
    SLOT_HEAD_WORDS,
    SLOTS,
    TAKEN_WORD,
    Message,
    refused,
    slot_word,
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
        self._last = [0] * LANES  # the number of the last note that a message brought
        self._taken = [0] * LANES  # that of the last note that was returned
        self._nbytes = 0
        for lane in range(LANES):
            for number in range(SLOTS):
                words.store(slot_word(lane, number) + 1, NEVER)

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
        if found is None and message.kind == DROPPED:
            self._drop(message)
            return
        if found is None:
            raise refused(message.written())
        found.ready = True
        found.by_word = False
        if message.kind == DROPPED:
            self._nbytes -= len(found.note or b"")
            found.note = None

    def _drop(self, message: Message) -> None:
        """Drop a note of which no last bytes have come, because its submit was interrupted; or that was delivered."""
        lane, number = message.lane, message.number
        if number > self._taken[lane]:
            self._begun[lane] = b""
            self._add(message)
            self._lanes[lane][-1].note = None
            self._lanes[lane][-1].ready = True

    def _add(self, message: Message) -> None:
        """Add a note, or keep its first bytes."""
        lane, number = message.lane, message.number
        note = self._begun[lane] + message.rest
        if (
            number != self._following(lane, number)
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

    def _following(self, lane: int, number: int) -> int:
        """Return the number of the next note that a message may bring: behind those in slots, up to ``number``."""
        at = max(self._last[lane], self._taken[lane]) + 1
        for _ in range(SLOTS):  # the visitor may write the words meanwhile
            if at >= number or self._words.load(slot_word(lane, at)) != at:
                break
            at += 1
        return at

    def arrived(self) -> list[bytes]:
        """Return the notes whose bytes have arrived since the last call; never block."""
        found: list[bytes] = []
        words = self._words
        for k, lane in enumerate(self._lanes):
            number = self._taken[k] + 1
            for _ in range(len(lane) + SLOTS):  # a visitor may fill slots as fast as they are read
                if lane and lane[0].number == number:
                    if not (number <= words.load(k) if lane[0].by_word else lane[0].ready):
                        break
                    note = lane.popleft().note
                    if note is not None:
                        self._nbytes -= len(note)
                else:
                    note = self._in_slot(k, number)
                    if note is None:
                        break
                if note is not None:
                    found.append(note)
                number += 1
            if number - 1 > self._taken[k]:
                self._taken[k] = number - 1
                words.store(TAKEN_WORD + k, number - 1)  # from here on, the visitor may use the slots again
        return found

    def _in_slot(self, lane: int, number: int) -> bytes | None:
        """Return a note that is in its slot, if its bytes have arrived."""
        words, at = self._words, slot_word(lane, number)
        if words.load(at) != number:
            return None
        ended, nbytes = SLOT_HEAD.unpack(words.get(at + 1, SLOT_HEAD.size))
        if words.load(ENDED_WORD + lane) < ended:
            return None
        note = words.get(at + SLOT_HEAD_WORDS, min(nbytes, SHORT_NBYTES))
        words.store(at + 1, NEVER)
        return note
