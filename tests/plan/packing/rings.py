"""A ring of slots on the CPU, and packed transfers through it."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

import kvplan
from kvplan.plan.packing.chunk_half import Half, Slot
from kvplan.plan.packing.packing import Packing
from kvplan.plan.row_plans import Memory, layout_of
from tests import oracle

STALE = 0x5A


class Ring:
    """Slots in host memory, with guard bytes behind each."""

    def __init__(self, slots: int, nbytes: int) -> None:
        pitch = -(-(nbytes + 64) // 256) * 256
        self.memory = np.full(slots * pitch + 256, STALE, np.uint8)
        start = -self.memory.ctypes.data % 256
        self.layout = layout_of([Memory(self.memory.ctypes.data, self.memory.nbytes, "cpu", self.memory)])
        self.slots = [Slot(self.layout, self.memory.ctypes.data + start + k * pitch, nbytes) for k in range(slots)]

    def bytes_of(self, slot: Slot, nbytes: int) -> np.ndarray:
        at = slot.address - self.memory.ctypes.data
        return self.memory[at : at + nbytes]


def bounds_of(packing: Packing, nbytes: int) -> list[tuple[int, int]]:
    cuts = packing.cuts(max(nbytes, packing.unit_nbytes))
    return list(pairwise(cuts))


def through(executor: kvplan.Executor, src: Half, dst: Half, ring: Ring, bounds: list[tuple[int, int]]) -> None:
    """Gather each chunk into a slot, carry its bytes to another slot, and scatter from there."""
    here, there = ring.slots[:2]
    for first, last in bounds:
        gather, scatter = src.plan(first, last, here), dst.plan(first, last, there)
        assert gather.nbytes == scatter.nbytes == src.chunk_nbytes(first, last) == dst.chunk_nbytes(first, last)
        executor.submit(gather).synchronize()
        ring.bytes_of(there, gather.nbytes)[:] = ring.bytes_of(here, gather.nbytes)
        executor.submit(scatter).synchronize()


def composed(src: Half, dst: Half, ring: Ring, bounds: list[tuple[int, int]]) -> dict[int, int]:
    """Destination byte -> source byte of both halves together, straight from the run tables."""
    slot = ring.slots[0]
    made: dict[int, int] = {}
    for first, last in bounds:
        gathered = oracle.factored_moves(src.plan(first, last, slot))
        assert sorted(gathered) == list(range(slot.address, slot.address + src.chunk_nbytes(first, last)))
        for to, at in oracle.factored_moves(dst.plan(first, last, slot)).items():
            assert to not in made
            made[to] = gathered[at]
    return made
