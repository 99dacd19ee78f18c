"""The slots of a peer's ring that this process may write."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvplan.agents.packed.pack_messages import MOST_BASE, Credit
from kvplan.errors import LayoutError


@dataclass
class _Lent:
    """A slot of a peer's ring.

    Attributes:
        turn: number of its latest use, from 1; 0 before the first.
        awaited: the turn that the peer will give back; None if it has given the slot back.
        moving: whether a write of this process may still change it.
        base: the turn of the grant, before the first use.
        recalled: whether the peer wants it back once it is free.
    """

    turn: int = 0
    awaited: int | None = None
    moving: bool = False
    base: int = 0
    recalled: bool = False


class Lent(NamedTuple):
    """A slot of a peer's ring for one chunk.

    Attributes:
        number: its place in the ring.
        turn: number of this use of the slot.
        address: its address in the peer's process.
    """

    number: int
    turn: int
    address: int


class Credits:
    """The slots of a peer's ring that this process may write.

    A slot is free once no write of this process moves into it, and the peer has given it back. Each use has a turn, one
    more than the turn before, so that a credit that comes twice, or late, frees nothing.

    The peer may grant further slots, and recall some. A recalled slot is returned once it is free. Turns go on when it
    is granted again, so that late messages about the earlier grant change nothing.

    Attributes:
        some: numbers of the slots that may be written now.
        returned: slots to return, each with the turn of its latest use, or of its grant.
        leaving: numbers of recalled slots that are free and were not used since their grant. They may be used once
            before :meth:`release` returns them, so that peers that take turns all get on.

    >>> credits = Credits()
    >>> credits.grant(4096, 64, 8, [(5, False, 0), (7, True, 0)])
    >>> lent = credits.take()
    >>> lent, credits.take()
    (Lent(number=5, turn=1, address=4416), None)
    >>> credits.credit(5, 1)
    >>> credits.written(5)
    >>> credits.credit(5, 1)
    >>> credits.take(), credits.free
    (Lent(number=5, turn=2, address=4416), 0)
    >>> credits.recall([Credit(5, 0)])
    >>> credits.written(5)
    >>> credits.credit(5, 2)
    >>> credits.returned, credits.granted
    ([Credit(slot=5, turn=2)], 1)
    """

    def __init__(self) -> None:
        self._slots: dict[int, _Lent] = {}
        self.some: list[int] = []
        self.returned: list[Credit] = []
        self.leaving: list[int] = []
        self._offered = 0  # of those that leave, how many could have been used
        self._past: dict[int, int] = {}  # turns of slots that were returned since the last greeting
        self._recalls: dict[int, int] = {}  # turns of recalled grants that have not come
        self._address = self._slot_nbytes = self._total = 0

    @property
    def free(self) -> int:
        """Number of slots that may be written now."""
        return len(self.some)

    @property
    def granted(self) -> int:
        """Number of slots that the peer has granted."""
        return len(self._slots)

    def grant(self, address: int, slot_nbytes: int, total: int, slots: Sequence[tuple[int, bool, int]]) -> None:
        """Take the place of a ring, and its slots: each with whether the peer still reads it, and with a turn.

        A slot that the peer still reads is given back with its turn. A slot that was known before stays out while a
        write moves into it.
        """
        if any(turn >= MOST_BASE for *_, turn in slots):
            raise LayoutError(f"a slot is granted at turn {max(turn for *_, turn in slots):,}")
        self._address, self._slot_nbytes, self._total = address, slot_nbytes, total
        self.withdraw()
        self._past.clear()
        self._recalls.clear()
        known, self._slots = self._slots, {}
        for number, busy, turn in slots:
            moving = number in known and known[number].moving
            slot = self._slots[number] = _Lent(turn, turn if busy else None, moving, turn)
            self._free_if(number, slot)

    def more(self, given: Sequence[Credit]) -> None:
        """Take further slots; raise LayoutError if the peer cannot have granted them."""
        for number, turn in given:
            slot, past = self._slots.get(number), self._past.get(number, -1)
            if number >= self._total or turn >= MOST_BASE or (slot is not None and turn > slot.base):
                raise LayoutError(f"slot {number} of {self._total:,} is granted, which is in use or does not exist")
            if slot is None and turn > past:
                recalled = self._recalls.get(number) == turn
                self._slots[number] = _Lent(turn, base=turn, recalled=recalled)
                self.some.append(number)
                if recalled:
                    self.leaving.append(number)

    def recall(self, given: Sequence[Credit]) -> None:
        """Return slots once they are free: those of these numbers, by the turns of their grants.

        Raises:
            LayoutError: the ring has no such slot.
        """
        for number, turn in given:
            slot = self._slots.get(number)
            if number >= self._total:
                raise LayoutError(f"slot {number} of {self._total:,} is recalled")
            if slot is None or slot.base < turn:
                self._recalls[number] = max(turn, self._recalls.get(number, 0))  # its grant is late
            elif slot.base == turn and not slot.recalled:
                slot.recalled = True
                if number in self.some and slot.turn == slot.base:
                    self.leaving.append(number)
                elif number in self.some:
                    self.some.remove(number)
                    self._free_if(number, slot)

    def release(self) -> None:
        """Return recalled slots that are free. Those that are new here may be used until the next call."""
        if self._offered:
            for number in self.leaving[: self._offered]:
                if number in self.some:
                    self.some.remove(number)
                    self._free_if(number, self._slots[number])
            del self.leaving[: self._offered]
        self._offered = len(self.leaving)

    def settle(self, moving: Collection[int]) -> None:
        """Note that writes move only into these slots."""
        for number, slot in self._slots.items():
            slot.moving = number in moving

    def withdraw(self) -> None:
        """Free no slot until the next greeting."""
        for some in (self.some, self.returned, self.leaving):
            some.clear()
        self._offered = 0
        for slot in self._slots.values():
            slot.awaited = -1

    def take(self) -> Lent | None:
        """Return a free slot for a chunk, or None."""
        if not self.some:
            return None
        number = self.some.pop()  # the latest: its memory is the likeliest to be in a cache
        slot = self._slots[number]
        slot.turn += 1
        slot.awaited, slot.moving = slot.turn, True
        return Lent(number, slot.turn, self._address + number * self._slot_nbytes)

    def back(self, lent: Lent) -> None:
        """Take back a slot that was not written; the next use has its turn."""
        slot = self._slots.get(lent.number)
        if slot is not None and slot.awaited == lent.turn == slot.turn:
            slot.turn, slot.awaited = lent.turn - 1, None
        self.written(lent.number)

    def written(self, number: int) -> None:
        """Note that the write into a slot has ended."""
        slot = self._slots.get(number)
        if slot is not None and slot.moving:
            slot.moving = False
            self._free_if(number, slot)

    def credit(self, number: int, turn: int) -> None:
        """Take a slot back from the peer, if it is out for this turn."""
        slot = self._slots.get(number)
        if slot is not None and slot.awaited == turn:
            slot.awaited = None
            self._free_if(number, slot)

    @property
    def awaited(self) -> int:
        """Number of slots that the peer has not given back."""
        return sum(slot.awaited is not None for slot in self._slots.values())

    def _free_if(self, number: int, slot: _Lent) -> None:
        if slot.awaited is not None or slot.moving:
            return
        if slot.recalled:
            del self._slots[number]
            self._past[number] = slot.turn
            self.returned.append(Credit(number, slot.turn))
        else:
            self.some.append(number)
