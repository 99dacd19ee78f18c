"""The ring of the staged path: slots in GPU memory, and the number of granules that go through a slot at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import ref

import numpy as np

from kvplan.execute.gpu.arena import Piece
from kvplan.execute.gpu.device_transfer import DeviceTransfer
from kvplan.execute.gpu.resources import DEFAULT_LIMITS, Limits
from kvplan.layout.strides import Int64Array
from kvplan.plan.staging import Staging

SLOTS = 4
TILE = 32 << 10  # bytes
WARPS = 16

BoolArray = np.ndarray[Any, np.dtype[np.bool_]]


class Ring:
    """Slots in GPU memory that chunks use in turn.

    Args:
        events: two events for each slot.

    Attributes:
        piece: the memory of all slots.
        slots, slot_nbytes: number of slots, and bytes per slot.
        filled, freed: (slots,) int64: for each slot, the event after its last write, and after its last read.
        users: for each slot, a weak reference to the last transfer through it: a transfer holds its plan's memory.
    """

    def __init__(self, events: list[int], piece: Piece, slots: int, slot_nbytes: int) -> None:
        self.piece = piece
        self.slots = slots
        self.slot_nbytes = slot_nbytes
        self.filled, self.freed = np.array(events, dtype=np.int64).reshape(2, slots)
        self.users: list[Callable[[], DeviceTransfer | None]] = [lambda: None] * slots
        self.next = 0

    @property
    def events(self) -> list[int]:
        """Return all events of the ring."""
        return [*self.filled.tolist(), *self.freed.tolist()]

    def enter(self, transfer: DeviceTransfer, chunks: int) -> tuple[int, BoolArray]:
        """Reserve the next slots for the chunks of a transfer.

        Returns:
            The first slot; and whether a transfer in flight still uses a slot, in the order of the chunks.
        """
        first, self.next = self.next, (self.next + chunks) % self.slots
        user, busy = ref(transfer), np.zeros(self.slots, dtype=np.bool_)
        for k in range(min(chunks, self.slots)):
            slot = (first + k) % self.slots
            before = self.users[slot]()
            busy[k] = before is not None and not before._over
            self.users[slot] = user
        return first, busy


def ringed(staging: Staging, *, load: bool) -> tuple[Int64Array, int]:
    """Return the items that the kernels copy between ring and cache, and their alignment in bytes."""
    return staging.runs if load else staging.runs[[1, 0, 2]], staging.alignment


def granules_of(nbytes: int, granule: int, slot: int, limits: Limits = DEFAULT_LIMITS) -> int:
    """Return the number of granules per chunk.

    Args:
        nbytes: bytes of the plan.
        granule, slot: bytes per granule, and bytes per slot of the ring; a slot holds at least one granule.
        limits: limits of small chunks.

    >>> [-(-16 // granules_of(16 * granule, granule, 42 << 20)) for granule in (147456, 655360, 1310720)]
    [1, 2, 3]
    """
    few = max(min(nbytes // limits.small_chunk_nbytes, limits.small_chunks), 1)
    return min(slot // granule, -(-nbytes // (few * granule)))
