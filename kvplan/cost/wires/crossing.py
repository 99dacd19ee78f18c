"""What of a plan crosses a wire: its bytes and units, its descriptors, and the runs that packing copies."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from kvplan.cost.statistics import counted, total
from kvplan.errors import KVPlanError
from kvplan.plan.plan import Plan
from kvplan.program.program import Program, RunGroup, merge_ranges

ORDERS = ("src", "dst")


class Crossing(NamedTuple):
    """The counts of one transfer between two processes, which the model of a wire reads.

    Attributes:
        nbytes: bytes that move.
        units: units that move.
        descriptors: messages of a transfer with a descriptor each. A strided row of NIXL counts as often as it repeats.
        gather_runs: contiguous copies from the source to the slots.
        scatter_runs: contiguous copies from the slots to the destination.
        pairs: pairs of processes that the counts are summed over; each has a ring of its own.

    >>> Crossing(8192, 2, 16, 16, 2).plus(Crossing(4096, 1, 8, 8, 1))
    Crossing(nbytes=12288, units=3, descriptors=24, gather_runs=24, scatter_runs=3, pairs=2)
    """

    nbytes: int
    units: int
    descriptors: int
    gather_runs: int
    scatter_runs: int
    pairs: int = 1

    def plus(self, other: Crossing) -> Crossing:
        """Return the sum of these counts and ``other``."""
        return Crossing(*(a + b for a, b in zip(self, other, strict=True)))

    @property
    def unit_nbytes(self) -> int:
        """Return the bytes of a unit, rounded up; 0 if no unit moves."""
        return -(-self.nbytes // self.units) if self.units else 0

    @property
    def descriptor_nbytes(self) -> int:
        """Return the bytes of a descriptor, on average; 0 without descriptors."""
        return self.nbytes // self.descriptors if self.descriptors else 0


def crossing_of(plan: Plan, order: str = "auto") -> Crossing:
    """Count a plan's descriptors, and the runs of its two halves if it is packed.

    Args:
        plan: a plan between two processes, or of this process.
        order: the side whose order the bytes of a unit have in a slot: ``"src"`` or ``"dst"``. That side has a copy for
            each contiguous range of a unit; the other side has a copy for each run of the plan. ``"auto"`` takes the
            side with fewer ranges, and the source if both have as many.

    Raises:
        KVPlanError: another order.

    >>> import kvplan, numpy as np
    >>> gpu = kvplan.KVLayout.from_tensors("layer block token dim", np.zeros((4, 8, 16, 64), np.int8))
    >>> host = kvplan.KVLayout.from_tensors("block layer token dim", np.zeros((8, 4, 16, 64), np.int8))
    >>> crossing_of(kvplan.compile(gpu, host).plan([1, 3], [3, 5]))
    Crossing(nbytes=8192, units=2, descriptors=8, gather_runs=8, scatter_runs=2, pairs=1)
    """
    if order not in (*ORDERS, "auto"):
        raise KVPlanError(f"order is {order!r}; give 'src', 'dst' or 'auto'")
    whole = total(plan.direction, counted(plan))
    runs = [0, 0]
    for part in plan.moving:
        for side in (0, 1):
            runs[side] += extents_of(part.group, side) * int(part.units.shape[1])
    kept = ORDERS.index(order) if order != "auto" else int(runs[1] < runs[0])
    halves = [whole.runs, whole.runs]
    halves[kept] = runs[kept]
    return Crossing(whole.nbytes, plan.units, whole.copies.total, halves[0], halves[1])


def unit_crossing(program: Program) -> Crossing:
    """Return the counts of one unit of a compiled pair, whose neighbours do not touch it."""
    pieces = [(group.packed.shape[1], *(extents_of(group, side) for side in (0, 1))) for group in program.groups]
    runs, src, dst = (sum(column) for column in zip(*pieces, strict=True))
    gather, scatter = (runs, dst) if dst < src else (src, runs)
    return Crossing(program.unit_nbytes, 1, runs, gather, scatter)


def sum_of(crossings: Iterable[Crossing]) -> Crossing:
    """Return the sum of several transfers, such as those of one process and all its peers.

    >>> sum_of([])
    Crossing(nbytes=0, units=0, descriptors=0, gather_runs=0, scatter_runs=0, pairs=0)
    """
    made = Crossing(0, 0, 0, 0, 0, 0)
    for one in crossings:
        made = made.plus(one)
    return made


def extents_of(group: RunGroup, side: int) -> int:
    """Return the contiguous ranges of one unit of a run group, on the source (0) or the destination (1)."""
    start, size = group.packed[side], group.packed[2]
    return int(np.size(merge_ranges(start, size)[0]))
