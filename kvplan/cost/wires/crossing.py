"""The part of a plan that crosses a wire: its bytes and units, its descriptors, and the runs that packing copies."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from kvplan.cost.statistics import counted, total
from kvplan.cost.wires.wire_profile import MIB
from kvplan.errors import KVPlanError
from kvplan.plan.packing.pack_order import SIDES, Order, sections_of
from kvplan.plan.plan import Plan
from kvplan.program.program import Program, RunGroup

SLOT = 16 * MIB  # bytes


class Crossing(NamedTuple):
    """The counts of one transfer between two processes, which the model of a wire reads.

    Attributes:
        nbytes: bytes that move.
        units: units that move; a large unit is cut, and counts as several.
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


def crossing_of(plan: Plan, order: Order = "auto", most: int = SLOT) -> Crossing:
    """Count a plan's descriptors, and the runs of its two halves if it is packed.

    Args:
        plan: a plan between two processes, or of this process.
        order: the side whose order the bytes of a unit have in a slot; see
            :func:`kvplan.plan.packing.packing.packing_of`.
        most: bytes of a slot; larger units than a sixteenth of it are cut, and count as several.

    Raises:
        KVPlanError: another order.

    >>> import kvplan, numpy as np
    >>> gpu = kvplan.KVLayout.from_tensors("layer block token dim", np.zeros((4, 8, 16, 64), np.int8))
    >>> host = kvplan.KVLayout.from_tensors("block layer token dim", np.zeros((8, 4, 16, 64), np.int8))
    >>> crossing_of(kvplan.compile(gpu, host).plan([1, 3], [3, 5]))
    Crossing(nbytes=8192, units=2, descriptors=8, gather_runs=8, scatter_runs=2, pairs=1)
    """
    if order not in (*SIDES, "auto"):
        raise KVPlanError(f"order is {order!r}; give 'src', 'dst' or 'auto'")
    whole = total(plan.direction, counted(plan))
    units = gather = scatter = 0
    for part in plan.moving:
        count, halves = int(part.units.shape[1]), _halves(part.group, order, most)
        units, gather, scatter = (a + count * b for a, b in zip((units, gather, scatter), halves, strict=True))
    return Crossing(whole.nbytes, units, whole.copies.total, gather, scatter)


def unit_crossing(program: Program, most: int = SLOT) -> Crossing:
    """Return the counts of one unit of a compiled pair, whose neighbours do not touch it.

    Args:
        program: the compiled pair.
        most: bytes of a slot.
    """
    halves = [_halves(group, "auto", most) for group in program.groups]
    pieces, gather, scatter = (sum(column) for column in zip(*halves, strict=True))
    runs = sum(int(group.packed.shape[1]) for group in program.groups)
    return Crossing(program.unit_nbytes, pieces, runs, gather, scatter)


def _halves(group: RunGroup, order: Order, most: int) -> tuple[int, int, int]:
    """Return the pieces of one unit in chunks, and its copies in each half."""
    sections = sections_of(group, order, most)
    gather = sum(int(one.src.packed.shape[1]) for one in sections)
    scatter = sum(int(one.dst.packed.shape[1]) for one in sections)
    return len(sections), gather, scatter


def sum_of(crossings: Iterable[Crossing]) -> Crossing:
    """Return the sum of several transfers, such as those of one process and all its peers.

    >>> sum_of([])
    Crossing(nbytes=0, units=0, descriptors=0, gather_runs=0, scatter_runs=0, pairs=0)
    """
    made = Crossing(0, 0, 0, 0, 0, 0)
    for one in crossings:
        made = made.plus(one)
    return made
