"""A ring of slots on the CPU, and packed transfers through it."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

import kvplan
from kvplan.agents.packed.pack_rows import Copier, rows_of
from kvplan.execute.transfer import Transfer
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
        assert_aligned(gather)
        assert_aligned(scatter)
        assert gather.nbytes == scatter.nbytes == src.chunk_nbytes(first, last) == dst.chunk_nbytes(first, last)
        executor.submit(gather).synchronize()
        ring.bytes_of(there, gather.nbytes)[:] = ring.bytes_of(here, gather.nbytes)
        executor.submit(scatter).synchronize()


def in_batches(executor: kvplan.Executor, packing: Packing, slots: list[Slot], rng) -> Transfer:
    """Move all chunks as packed transfers do, one to four at once, in slots of any order; return the last transfer."""
    gathers, scatters = (rows_of([half], slots[0].nbytes) for half in (packing.src, packing.dst))
    to_slots, from_slots = Copier(executor), Copier(executor)
    last, done = None, 0
    while done < len(gathers):
        some = slice(done, done + int(rng.integers(1, 5)))
        places = [slots[k] for k in rng.permutation(len(slots))]
        gathered = to_slots.submit(list(zip(gathers[some], places, strict=False)), last, urgent=False)
        last = from_slots.submit(list(zip(scatters[some], places, strict=False)), gathered, urgent=False)
        done = some.stop
    assert last is not None
    return last


def composed(src: Half, dst: Half, ring: Ring, bounds: list[tuple[int, int]]) -> dict[int, int]:
    """Destination byte -> source byte of both halves together, straight from the run tables."""
    slot = ring.slots[0]
    made: dict[int, int] = {}
    for first, last in bounds:
        gather, scatter = src.plan(first, last, slot), dst.plan(first, last, slot)
        assert_aligned(gather)
        assert_aligned(scatter)
        gathered = oracle.factored_moves(gather)
        assert sorted(gathered) == list(range(slot.address, slot.address + src.chunk_nbytes(first, last)))
        for to, at in oracle.factored_moves(scatter).items():
            assert to not in made
            made[to] = gathered[at]
    return made


def assert_aligned(plan: kvplan.Plan) -> None:
    """What a run group says of its alignment holds, or a kernel's words would not fit."""
    for group, units in plan.parts:
        assert not (units % group.alignment).any()
        assert not (np.stack(group.offsets) % group.alignment).any()
