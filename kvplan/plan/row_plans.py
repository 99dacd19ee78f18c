"""Plans from addresses: rows of (source, destination, bytes) become a plan that every executor takes.

The units of such a plan are the rows themselves: a run group for each size, of one run without an offset.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from kvplan.base.process import cached_property
from kvplan.layout.kvlayout import KVLayout
from kvplan.layout.strides import Int64Array
from kvplan.plan.descriptors import Part
from kvplan.plan.placement import Side, sides
from kvplan.plan.plan import NO_SEAMS, Plan, direction_of
from kvplan.program.program import BlockAxis, Program, Run, RunGroup


class Memory:
    """A range of this process's memory, with the members of a torch tensor, for :meth:`KVLayout.from_tensors`.

    Args:
        address, nbytes: the range.
        device: ``"cpu"``, or a GPU such as ``"cuda:0"``.
        owner: an object that keeps the memory.

    >>> pool = np.zeros(256, np.uint8)
    >>> layout = layout_of([Memory(pool.ctypes.data, 128, "cpu"), Memory(pool.ctypes.data + 128, 128, "cpu")])
    >>> layout.device, [region.nbytes for region in layout.regions]
    ('cpu', [128, 128])
    """

    dtype = "uint8"

    def __init__(self, address: int, nbytes: int, device: str, owner: Any = None) -> None:
        self._address = address
        self.shape = (1, nbytes)
        self.device = device
        self.owner = owner

    def data_ptr(self) -> int:
        """Return the address of the first byte."""
        return self._address

    def stride(self) -> tuple[int, int]:
        """Return the strides, in bytes."""
        return self.shape[1], 1

    def element_size(self) -> int:
        """Return the bytes of an element."""
        return 1


def layout_of(ranges: Sequence[Memory]) -> KVLayout:
    """Return a layout over ranges of one device that do not overlap: each is a layer with one block."""
    return KVLayout.merge(
        [KVLayout.from_tensors("block dim", memory, layer_start=layer) for layer, memory in enumerate(ranges)]
    )


@lru_cache(maxsize=256)
def _group(nbytes: int, alignment: int) -> RunGroup:
    """Return the run group of rows of a size. It is kept, since a GPU's executor uploads a table for each group."""
    axis = BlockAxis.multiples(min(alignment, nbytes & -nbytes))
    return RunGroup(axis, axis, 0, 0, (Run(0, 0, nbytes, ()),))


class RowProgram:
    """The program of plans between two layouts by addresses; see :class:`kvplan.plan.plan.PlannedBy`.

    Args:
        src, dst: layouts that hold every row.
        group: the run group of all rows, if they have one size; None for rows of any size.

    >>> a, b = np.arange(64, dtype=np.uint8), np.zeros(64, np.uint8)
    >>> program = RowProgram(*(layout_of([Memory(x.ctypes.data, 64, "cpu")]) for x in (a, b)))
    >>> rows = np.array([0, 32]) + a.ctypes.data, np.array([8, 0]) + b.ctypes.data
    >>> program.plan(*rows, 8, 8)
    Plan(host of 2 units, 16 bytes)
    """

    def __init__(self, src: KVLayout, dst: KVLayout, group: RunGroup | None = None) -> None:
        self.src = src
        self.dst = dst
        self.program = Program(1, 1, 1, () if group is None else (group,))
        self._direction = direction_of(src, dst)

    @cached_property
    def sides(self) -> tuple[Side, Side]:
        """Both sides as arrays: the id of a row is its address, divided by a number that divides all of them."""
        return sides(self.program)

    @classmethod
    def of_rows(cls, src: KVLayout, dst: KVLayout, size: int, step: int) -> RowProgram:
        """Return the program of rows of one size, whose addresses are multiples of a step."""
        return cls(src, dst, _group(size, step))

    def of_layers(self, layers: tuple[int, ...]) -> RowProgram:
        """Return the program: it has no layers."""
        del layers
        return self

    def plan(self, src: Int64Array, dst: Int64Array, size: int | Int64Array, alignment: int) -> Plan:
        """Plan the copies of some rows.

        Args:
            src, dst: addresses of each row; they lie within the layouts.
            size: bytes of every row, or of each.
            alignment: a power of two that divides every address and size.
        """
        units = np.empty((2, src.size), dtype=np.int64)
        units[0], units[1] = src, dst
        if isinstance(size, int):
            return self.of_units(units, size, alignment)
        parts = tuple(
            Part(_group(int(each), alignment), np.ascontiguousarray(units[:, size == each]))
            for each in np.unique(size)
        )  # fmt: skip
        return self._plan(parts, src.size, int(size.sum()))

    def of_units(self, units: Int64Array, size: int, alignment: int) -> Plan:
        """Plan the copies of rows of one size; the plan keeps the array.

        Args:
            units: (2, n) int64: source and destination address of each row; they lie within the layouts.
            size, alignment: see :meth:`plan`.
        """
        return self._plan((Part(_group(size, alignment), units),), units.shape[1], size * units.shape[1])

    def _plan(self, parts: tuple[Part, ...], count: int, nbytes: int) -> Plan:
        skips = ((0, 0),) * len(parts)
        return Plan(parts, count, nbytes, self._direction, ((self.src, self.dst),), NO_SEAMS, skips, (self,))
