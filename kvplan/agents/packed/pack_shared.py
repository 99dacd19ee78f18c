"""The parts that all lanes of an end share."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from kvplan.agents.packed.pack_rows import Mover
from kvplan.agents.packed.slot_ring import RingSlot, SlotRing


class Own(NamedTuple):
    """The parts that all lanes of an end share.

    Attributes:
        ring: this process's slots.
        sends: free slots to gather into.
        senders: numbers of all slots to gather into.
        most: most of them that one lane has.
        mover: gathers and scatters.
        now: clock, in seconds.
        epoch: returns a number for a lane, larger than all before.
        notes: notes for the user, as (peer, note).
    """

    ring: SlotRing
    sends: list[RingSlot]
    senders: frozenset[int]
    most: int
    mover: Mover
    now: Callable[[], float]
    epoch: Callable[[], int]
    notes: deque[tuple[str, bytes]]


def tell_user(notes: deque[tuple[str, bytes]], peer: str, note: bytes) -> None:
    """Keep a note of a peer for the user."""
    notes.append((peer, note))
