"""The part of a plan that crosses a wire: its bytes and units, its descriptors, and the runs that packing copies."""

from __future__ import annotations

from typing import NamedTuple

from kvplan.cost.wires.wire_profile import MIB
from kvplan.plan.packing.pack_order import sections_of
from kvplan.plan.plan import Plan
from kvplan.program.program import RunGroup

SLOT = 16 * MIB  # bytes


class Crossing(NamedTuple):
    """The counts of one transfer between two processes, which the model of a wire reads.

    Attributes:
        nbytes: bytes that move.
        units: units that move; a large unit is cut, and counts as several.
        descriptors: messages of a transfer with a descriptor each. A strided row of NIXL counts as often as it repeats.
        gather_runs: contiguous copies from the source to the slots.
        scatter_runs: contiguous copies from the slots to the destination.
    """

    nbytes: int
    units: int
    descriptors: int
    gather_runs: int
    scatter_runs: int

    @property
    def unit_nbytes(self) -> int:
        """Return the bytes of a unit, rounded up; 0 if no unit moves."""
        return -(-self.nbytes // self.units) if self.units else 0

    @property
    def descriptor_nbytes(self) -> int:
        """Return the bytes of a descriptor, on average; 0 without descriptors."""
        return self.nbytes // self.descriptors if self.descriptors else 0


def crossing_of(plan: Plan, most: int = SLOT) -> Crossing:
    """Count a plan's descriptors, and the runs of its two halves if it is packed.

    Args:
        plan: a plan between two processes, or of this process.
        most: bytes of a slot; larger units than a sixteenth of it are cut, and count as several.

    >>> import kvplan, numpy as np
    >>> gpu = kvplan.KVLayout.from_tensors("layer block token dim", np.zeros((4, 8, 16, 64), np.int8))
    >>> host = kvplan.KVLayout.from_tensors("block layer token dim", np.zeros((8, 4, 16, 64), np.int8))
    >>> crossing_of(kvplan.compile(gpu, host).plan([1, 3], [3, 5]))
    Crossing(nbytes=8192, units=2, descriptors=8, gather_runs=8, scatter_runs=2)
    """
    units = gather = scatter = descriptors = 0
    for part in plan.parts:
        count, (sections, gathers, scatters) = int(part.units.shape[1]), _halves(part.group, most)
        units, gather, scatter = units + count * sections, gather + count * gathers, scatter + count * scatters
        descriptors += count * part.group.packed.shape[1]
    if any(part.group.chainable for part in plan.parts):  # units that touch share a descriptor
        descriptors = plan.descriptors().size.size
    return Crossing(plan.nbytes, units, descriptors, gather, scatter)


def _halves(group: RunGroup, most: int) -> tuple[int, int, int]:
    """Return the pieces of one unit in chunks, and its copies in each half."""
    sections = sections_of(group, "auto", most)
    gather = sum(int(one.src.packed.shape[1]) for one in sections)
    scatter = sum(int(one.dst.packed.shape[1]) for one in sections)
    return len(sections), gather, scatter
