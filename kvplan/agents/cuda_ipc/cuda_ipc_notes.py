"""Notes of one visitor that wait, in the owner, for the last byte of their transfers."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from kvplan.agents.cuda_ipc.cuda_ipc_messages import (
    DROPPED,
    ENDED_WORD,
    LANES,
    LATER,
    NEVER,
    NOTE,
    SHORT_NBYTES,
    SLOT_HEAD,
    SLOT_HEAD_WORDS,
    SLOTS,
    TAKEN_WORD,
    Message,
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
        self._taken = [0] * LANES  # the number of the last note that was returned
        for lane in range(LANES):
            for number in range(SLOTS):
                words.store(slot_word(lane, number) + 1, NEVER)

    def take(self, message: Message) -> None:
        """Take a message about a note."""
        lane, number = self._lanes[message.lane], message.number
        if message.kind in (NOTE, LATER):
            lane.append(_Pending(number, message.rest, message.kind == NOTE))
            return
        found = next((one for one in lane if one.number == number), None)
        if found is None:
            if number > self._taken[message.lane]:  # Ctrl-C came in its submit
                lane.append(_Pending(number, None, by_word=False, ready=True))
            return
        found.ready, found.by_word = True, False
        if message.kind == DROPPED:
            found.note = None

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
