"""Slots: the pieces of this process's ring, and the slots of a peer's ring that this process may write."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvplan.errors import LayoutError, PathError
from kvplan.layout.kvlayout import KVLayout

MOST_SLOTS = 1 << 16  # of a ring
ALIGNMENT = 256  # bytes: every slot begins at a multiple, so that kernels move wide words


class RingMemory:
    """The memory of a ring, or of a slot, with the members of a torch tensor, for :meth:`KVLayout.from_tensors`.

    Args:
        address: address of the first byte.
        nbytes: its bytes.
        device: ``"cpu"``, or a GPU such as ``"cuda:0"``.
        owner: an object that keeps the memory.

    >>> import numpy as np
    >>> pool = np.zeros(256, np.uint8)
    >>> KVLayout.from_tensors("block dim", RingMemory(pool.ctypes.data, 256, "cpu", pool)).nbytes
    256
    """

    dtype = "uint8"

    def __init__(self, address: int, nbytes: int, device: str, owner: Any = None) -> None:
        self.address, self.nbytes, self.device, self.owner = address, nbytes, device, owner
        self.shape = (1, nbytes)

    def data_ptr(self) -> int:
        """Return the address of the first byte."""
        return self.address

    def stride(self) -> tuple[int, int]:
        """Return the strides, in bytes."""
        return self.nbytes, 1

    def element_size(self) -> int:
        """Return the bytes of an element."""
        return 1


class Slot(NamedTuple):
    """Memory of a ring for one chunk.

    Attributes:
        layout: a layout over the whole ring; it keeps the ring's memory.
        address: address of the slot's first byte.
        nbytes: its bytes.
    """

    layout: KVLayout
    address: int
    nbytes: int


class RingSlot(NamedTuple):
    """One slot of this process's ring.

    Attributes:
        number: its place in the ring, from 0.
        place: its memory.
    """

    number: int
    place: Slot


class SlotRing:
    """The slots of this process: it gathers into some of them, and peers write into the others.

    Args:
        memory: the memory of the ring.
        slot_nbytes: bytes of a slot; a multiple of 256. Memory before the first multiple of 256, and a rest that makes
            no slot, are not used.

    Attributes:
        slots: all slots, by number.
        address: address of the first slot.
        slot_nbytes: as given.

    Raises:
        LayoutError: the memory has not one slot, or more than 65,536 slots; or ``slot_nbytes`` is no multiple of 256.

    >>> import numpy as np
    >>> pool = np.zeros(1 << 16, np.uint8)
    >>> ring = SlotRing(RingMemory(pool.ctypes.data, pool.nbytes, "cpu", pool), 1 << 12)
    >>> len(ring.slots) in (15, 16), ring.take().number, ring.free + 1 == len(ring.slots)
    (True, 0, True)
    """

    def __init__(self, memory: RingMemory, slot_nbytes: int) -> None:
        if slot_nbytes < ALIGNMENT or slot_nbytes % ALIGNMENT:
            raise LayoutError(f"slot_nbytes is {slot_nbytes}; it is a multiple of {ALIGNMENT}")
        self.address = -(-memory.address // ALIGNMENT) * ALIGNMENT
        number = (memory.address + memory.nbytes - self.address) // slot_nbytes
        if not 1 <= number <= MOST_SLOTS:
            raise LayoutError(
                f"a ring of {memory.nbytes:,} bytes has {number:,} slots of {slot_nbytes:,} bytes; a ring has from 1 to "
                f"{MOST_SLOTS:,}"
            )
        self.memory, self.slot_nbytes = memory, slot_nbytes
        layout = KVLayout.from_tensors("block dim", memory)
        starts = range(self.address, self.address + number * slot_nbytes, slot_nbytes)
        self.slots = tuple(RingSlot(k, Slot(layout, start, slot_nbytes)) for k, start in enumerate(starts))
        self._free = deque(range(number))

    @property
    def free(self) -> int:
        """Number of slots that are not taken."""
        return len(self._free)

    def take(self) -> RingSlot | None:
        """Return a free slot, or None."""
        return self.slots[self._free.popleft()] if self._free else None

    def grant(self, count: int) -> tuple[int, ...]:
        """Take slots for a peer: at most ``count``, and at least one; raise PathError if none is free."""
        if not self._free:
            raise PathError(f"all {len(self.slots)} slots of the ring are taken; give the ring more memory")
        return tuple(self._free.popleft() for _ in range(min(count, len(self._free))))

    def give(self, number: int) -> None:
        """Take a slot back."""
        self._free.append(number)


@dataclass
class _Lent:
    """A slot of a peer's ring.

    Attributes:
        turn: number of its latest use, from 1; 0 before the first.
        awaited: the turn that the peer will give back; None if it has given the slot back.
        moving: whether a write of this process may still change it.
    """

    turn: int = 0
    awaited: int | None = None
    moving: bool = False


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

    A slot is free once no write of this process moves into it, and the peer has given it back. Each use has a turn, so
    that a credit that comes twice, or late, frees nothing.

    >>> credits = Credits()
    >>> credits.grant(4096, 64, [(5, False), (7, True)])
    >>> lent = credits.take()
    >>> lent, credits.take()
    (Lent(number=5, turn=1, address=4416), None)
    >>> credits.credit(5, 1)
    >>> credits.written(5)
    >>> credits.credit(5, 1)
    >>> credits.take(), credits.free
    (Lent(number=5, turn=2, address=4416), 0)
    """

    def __init__(self) -> None:
        self._slots: dict[int, _Lent] = {}
        self._free: deque[int] = deque()
        self._address = self._slot_nbytes = 0

    @property
    def free(self) -> int:
        """Number of slots that may be written now."""
        return len(self._free)

    @property
    def granted(self) -> int:
        """Number of slots that the peer has granted."""
        return len(self._slots)

    @property
    def moving(self) -> bool:
        """Whether a write of this process may still change the peer's ring."""
        return any(slot.moving for slot in self._slots.values())

    def grant(self, address: int, slot_nbytes: int, numbers: Sequence[tuple[int, bool]]) -> None:
        """Take the place of a ring, and its slots: each with whether the peer still reads it.

        A slot that the peer still reads is given back with turn 0. Slots that were known before keep their turns, and
        stay out while a write moves into them.
        """
        self._address, self._slot_nbytes = address, slot_nbytes
        self._free.clear()
        known, self._slots = self._slots, {}
        for number, busy in numbers:
            before = known.get(number, _Lent())
            slot = self._slots[number] = _Lent(before.turn, 0 if busy else None, before.moving)
            self._free_if(number, slot)

    def withdraw(self) -> None:
        """Free no slot until the next grant."""
        self._free.clear()
        for slot in self._slots.values():
            slot.awaited = -1

    def take(self) -> Lent | None:
        """Return a free slot for a chunk, or None."""
        if not self._free:
            return None
        number = self._free.popleft()
        slot = self._slots[number]
        slot.turn += 1
        slot.awaited, slot.moving = slot.turn, True
        return Lent(number, slot.turn, self._address + number * self._slot_nbytes)

    def back(self, lent: Lent) -> None:
        """Take back a slot that was not written."""
        self.credit(lent.number, lent.turn)
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

    def _free_if(self, number: int, slot: _Lent) -> None:
        if slot.awaited is None and not slot.moving:
            self._free.append(number)
