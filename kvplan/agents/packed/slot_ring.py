"""The ring of this process, cut into slots, and what else all lanes of an end share."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple

from kvplan.agents.packed.pack_rows import Mover
from kvplan.errors import LayoutError
from kvplan.plan.packing.chunk_half import Slot
from kvplan.plan.row_plans import Memory, layout_of

MOST_SLOTS = 1 << 16  # of a ring
ALIGNMENT = 256  # bytes: every slot begins at a multiple, so that kernels move wide words


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
    >>> ring = SlotRing(Memory(pool.ctypes.data, pool.nbytes, "cpu", pool), 1 << 12)
    >>> len(ring.slots) in (15, 16), ring.take(1)[0].number, ring.free + 1 == len(ring.slots)
    (True, 0, True)
    """

    def __init__(self, memory: Memory, slot_nbytes: int) -> None:
        if slot_nbytes < ALIGNMENT or slot_nbytes % ALIGNMENT:
            raise LayoutError(f"slot_nbytes is {slot_nbytes}; it is a multiple of {ALIGNMENT}")
        start, nbytes = memory.data_ptr(), memory.shape[1]
        self.address = -(-start // ALIGNMENT) * ALIGNMENT
        number = (start + nbytes - self.address) // slot_nbytes
        if not 1 <= number <= MOST_SLOTS:
            raise LayoutError(
                f"a ring of {nbytes:,} bytes has {number:,} slots of {slot_nbytes:,} bytes; a ring has from 1 to "
                f"{MOST_SLOTS:,}"
            )
        self.memory, self.slot_nbytes = memory, slot_nbytes
        layout = layout_of([memory])
        starts = range(self.address, self.address + number * slot_nbytes, slot_nbytes)
        self.slots = tuple(RingSlot(k, Slot(layout, start, slot_nbytes)) for k, start in enumerate(starts))
        self._free = list(reversed(range(number)))

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return len(self.slots) * self.slot_nbytes

    @property
    def free(self) -> int:
        """Number of slots that are not taken."""
        return len(self._free)

    def take(self, count: int) -> list[RingSlot]:
        """Take at most ``count`` slots: none if none is free."""
        return [self.slots[self._free.pop()] for _ in range(min(count, len(self._free)))]

    def give(self, slots: Iterable[RingSlot]) -> None:
        """Take slots back."""
        self._free += [slot.number for slot in slots]

    def give_all_but(self, used: Collection[int]) -> None:
        """Take all slots back but those of these numbers."""
        self._free = [slot.number for slot in reversed(self.slots) if slot.number not in used]


class Own(NamedTuple):
    """The parts that all lanes of an end share.

    Attributes:
        ring: this process's slots.
        sends: free slots to gather into.
        senders: numbers of all slots to gather into.
        mover: gathers and scatters.
        now: clock, in seconds.
        epoch: returns a number for a lane, larger than all before.
        notes: notes for the user, as (peer, note).
        together: whether one submit copies several chunks, if they wait.
        leg_units: most units of a leg of an order, unless one chunk has more.
    """

    ring: SlotRing
    sends: list[RingSlot]
    senders: frozenset[int]
    mover: Mover
    now: Callable[[], float]
    epoch: Callable[[], int]
    notes: deque[tuple[str, bytes]]
    together: bool
    leg_units: int


def tell_user(notes: deque[tuple[str, bytes]], peer: str, note: bytes) -> None:
    """Keep a note of a peer for the user."""
    notes.append((peer, note))
