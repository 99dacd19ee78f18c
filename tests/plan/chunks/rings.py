"""A ring of slots, and plans that go through it in chunks, as two processes move them."""

from __future__ import annotations

import numpy as np

import kvplan
from kvplan import KVLayout
from kvplan.layout.spec import built_from_dump, document_of
from kvplan.plan.chunks import Chunks, Outline, outlines_of, sources_of
from kvplan.plan.copy_program import compile_quietly
from kvplan.plan.plan import Plan, PlanSource
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
        self.slots = [self.memory.ctypes.data + start + k * pitch for k in range(slots)]

    def bytes_of(self, slot: int, nbytes: int) -> np.ndarray:
        at = slot - self.memory.ctypes.data
        return self.memory[at : at + nbytes]


class Half:
    """One end of a transfer in chunks: it knows a plan, or its outlines alone."""

    def __init__(self, plan: Plan, side: int, most: int, groups: int = 1, outlines: list[Outline] | None = None):
        self.side = side
        self.own = list(dict.fromkeys(pair[side] for pair in plan.layouts))
        self.sources: tuple[PlanSource, ...] = sources_of(plan)
        self.cut = Chunks(outlines_of(plan) if outlines is None else outlines, most, groups)

    def plan(self, number: int, ids: np.ndarray, ring: KVLayout, slot: int) -> Plan:
        return self.cut.plan(number, self.side, ids, self.own, ring, slot)

    def ids(self, number: int, side: int) -> np.ndarray:
        return self.cut.ids(self.sources, number, side)


def far_outlines(plan: Plan) -> list[Outline]:
    """The outlines of another process: it has read both layouts of each program, and compiled them."""

    def read(layout):
        return KVLayout(built_from_dump(document_of(layout.built)))

    return [
        outline._replace(
            program=compile_quietly(read(outline.program.src), read(outline.program.dst), reinterpret=True)
        )
        for outline in outlines_of(plan)
    ]


def halves(plan: Plan, most: int, groups: int = 1) -> tuple[Half, Half]:
    """Both ends of a transfer; the end that scatters knows the outlines alone."""
    return Half(plan, 0, most, groups), Half(plan, 1, most, groups, far_outlines(plan))


def through(executor: kvplan.Executor, plan: Plan, most: int, groups: int = 1) -> Chunks:
    """Gather each chunk into a slot, carry its bytes to another slot, and scatter from there."""
    ring = Ring(2, most)
    here, there = ring.slots
    src, dst = halves(plan, most, groups)
    for number, chunk in enumerate(src.cut.chunks):
        gather = src.plan(number, src.ids(number, 0), ring.layout, here)
        scatter = dst.plan(number, src.ids(number, 1), ring.layout, there)
        assert_aligned(gather)
        assert_aligned(scatter)
        assert gather.nbytes == scatter.nbytes == chunk.nbytes <= most
        executor.submit(gather).synchronize()
        ring.bytes_of(there, gather.nbytes)[:] = ring.bytes_of(here, gather.nbytes)
        executor.submit(scatter).synchronize()
    return src.cut


def composed(plan: Plan, most: int, groups: int = 1) -> dict[int, int]:
    """Destination byte -> source byte of both halves together, straight from the run tables."""
    ring = Ring(1, most)
    slot, moves = ring.slots[0], dict[int, int]()
    src, dst = halves(plan, most, groups)
    assert src.cut.layers == dst.cut.layers
    assert [(one.nbytes, one.group) for one in src.cut.chunks] == [(one.nbytes, one.group) for one in dst.cut.chunks]
    for number, chunk in enumerate(src.cut.chunks):
        gather = src.plan(number, src.ids(number, 0), ring.layout, slot)
        scatter = dst.plan(number, src.ids(number, 1), ring.layout, slot)
        assert_aligned(gather)
        assert_aligned(scatter)
        gathered = oracle.factored_moves(gather)
        assert sorted(gathered) == list(range(slot, slot + chunk.nbytes))
        for to, at in oracle.factored_moves(scatter).items():
            assert to not in moves
            moves[to] = gathered[at]
    return moves


def assert_aligned(plan: kvplan.Plan) -> None:
    """What a run group says of its alignment holds, or a kernel's words would not fit."""
    for group, units in plan.parts:
        assert not (units % group.alignment).any()
        assert not (group.packed % group.alignment).any()
