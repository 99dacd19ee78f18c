"""The check of a recipe's addresses: they lie in offered memory.

It looks at each unit once, and at each run of one unit once, unless blocks are spread over separate allocations.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from kvplan.base.limits import LIMITS
from kvplan.errors import TransferError
from kvplan.layout.components import touching_seams
from kvplan.layout.kvlayout import KVLayout
from kvplan.layout.strides import Int64Array

TILE = 1 << 20  # ranges that are checked at once


class Extents(NamedTuple):
    """The bytes of a unit at its own side.

    Attributes:
        start: first bytes, ascending, relative to the unit's address.
        size: bytes of each.
    """

    start: Int64Array
    size: Int64Array


class Column(NamedTuple):
    """The addresses of units.

    Attributes:
        addresses: (n,) int64: the first address, and multiples of ``step`` from it.
        step: in bytes.
        low, high: lowest and highest address; 0 without units.
    """

    addresses: Int64Array
    step: int
    low: int
    high: int


def extents_of(start: Int64Array, size: Int64Array) -> Extents:
    """Join byte ranges that touch or overlap.

    >>> extents_of(np.array([8, 0, 4, 40]), np.array([8, 6, 4, 2]))
    Extents(start=array([ 0, 40]), size=array([16,  2]))
    """
    order = np.argsort(start, kind="stable")
    first, last = start[order], (start + size)[order]
    reach = np.maximum.accumulate(last)
    cuts = np.flatnonzero(first[1:] > reach[:-1]) + 1
    begin = np.concatenate((first[:1], first[cuts]))
    end = np.concatenate((reach[cuts - 1], reach[-1:]))
    return Extents(begin, end - begin)


def joined(several: Sequence[Extents]) -> Extents:
    """Join the extents of several sections of one unit."""
    if len(several) == 1:
        return several[0]
    return extents_of(*(np.concatenate(column) for column in zip(*several, strict=True)))


class Offered:
    """Layouts that another process may read or write through recipes, as ranges of memory.

    Args:
        layouts: layouts of this process's memory.
    """

    def __init__(self, layouts: Iterable[KVLayout]) -> None:
        self.layouts = tuple(layouts)
        self._ranges = {writing: self._joined(writing=writing) for writing in (False, True)}
        self._known: dict[frozenset[int], tuple[tuple[KVLayout, ...], Int64Array]] = {}

    def current(self) -> Offered:
        """Return the layouts that are offered now; a recipe is checked against one return value."""
        return self

    def _joined(self, *, writing: bool) -> tuple[Int64Array, Int64Array, list[frozenset[int]]]:
        """Return the ranges' first bytes and ends, ascending, and the numbers of the layouts that each belongs to."""
        regions = sorted(
            (region.address, region.end, number)
            for number, layout in enumerate(self.layouts)
            for region in layout.regions
            if region.writable or not writing
        )
        starts: list[int] = []
        ends: list[int] = []
        owners: list[set[int]] = []
        for start, end, number in regions:
            if ends and start <= ends[-1]:
                ends[-1] = max(ends[-1], end)
                owners[-1].add(number)
            else:
                starts.append(start)
                ends.append(end)
                owners.append({number})
        return np.array(starts, dtype=np.int64), np.array(ends, dtype=np.int64), [frozenset(some) for some in owners]

    def ranges(self, *, writing: bool) -> tuple[Int64Array, Int64Array, list[frozenset[int]]]:
        """Return the ranges that may be read, or written: first bytes, ends, and the layouts that each belongs to."""
        return self._ranges[writing]

    def narrowed(self, owners: frozenset[int], start: int, end: int, *, writing: bool) -> set[int]:
        """Return one of several layouts in whose memory a byte range lies as a whole; all of them if there is none.

        Pools of an engine may share one buffer. Executors know plans of one layout again, and choose a path quickly.
        """
        for number in sorted(owners) if len(owners) > 1 else ():
            for region in self.layouts[number].regions:
                if region.address <= start and end <= region.end and (region.writable or not writing):
                    return {number}
        return set(owners)

    def of(self, touched: Iterable[int]) -> tuple[tuple[KVLayout, ...], Int64Array]:
        """Return the layouts of these numbers, and the addresses that no descriptor of them may cross.

        Raises:
            TransferError: they are on the CPU and on a GPU.
        """
        key = frozenset(touched)
        known = self._known.get(key)
        if known is None:
            layouts = tuple([self.layouts[number] for number in sorted(key)])
            if len({layout.device == "cpu" for layout in layouts}) > 1:
                raise TransferError("a recipe from a peer names memory of the CPU and of a GPU; give one for each")
            regions = {(region.address, region.nbytes): region for layout in layouts for region in layout.regions}
            marks = {seam for layout in layouts for seam in layout.seams} | set(touching_seams(list(regions.values())))
            known = self._known[key] = layouts, np.array(sorted(marks), dtype=np.int64)
        return known


def check_within(column: Column, extents: Extents, offered: Offered, *, writing: bool) -> set[int]:
    """Check that all extents of all units lie in offered memory.

    Args:
        column: the units.
        extents: bytes of a unit.
        offered: the memory.
        writing: whether they are written.

    Returns:
        The numbers of the layouts that they belong to.

    Raises:
        TransferError: a byte lies outside, or is read-only and would be written.
    """
    addresses, low, high = column.addresses, column.low, column.high
    if not addresses.size:
        return set()
    starts, ends, owners = offered.ranges(writing=writing)
    # Most recipes lie in one range as a whole: extents ascend, and do not touch.
    first, last = low + int(extents.start[0]), high + int(extents.start[-1] + extents.size[-1])
    whole = bisect_right(starts, first) - 1
    if whole >= 0 and last <= ends[whole]:
        return offered.narrowed(owners[whole], first, last, writing=writing)
    # An extent of every unit lies in a range if that of the first unit and that of the last unit do.
    at = np.searchsorted(starts, extents.start + low, side="right") - 1
    fine = np.flatnonzero((at >= 0) & (extents.start + extents.size + high <= _at(ends, at)))
    found = set(np.unique(at[fine]).tolist())
    if fine.size < at.size:
        rest = np.setdiff1d(np.arange(at.size), fine)
        if rest.size * addresses.size > LIMITS.recipe_work:
            raise TransferError(
                f"a recipe from a peer takes {rest.size * addresses.size:,} ranges of memory to check, and at most "
                f"{LIMITS.recipe_work:,} are; ask for fewer blocks at once"
            )
        step = max(TILE // addresses.size, 1)
        for some in np.split(rest, np.arange(step, rest.size, step)):
            begin = (addresses[:, None] + extents.start[some]).ravel()
            size = np.tile(extents.size[some], addresses.size)
            at = np.searchsorted(starts, begin, side="right") - 1
            outside = np.flatnonzero((at < 0) | (begin + size > _at(ends, at)))
            if outside.size:
                raise TransferError(
                    f"a recipe from a peer {'writes' if writing else 'reads'} {int(size[outside[0]]):,} bytes at "
                    f"{int(begin[outside[0]]):#x}, which are not in the {'writable ' if writing else ''}memory that it "
                    "was offered"
                )
            found |= set(np.unique(at).tolist())
    return set().union(*(owners[number] for number in found))


def _at(ends: Int64Array, at: Int64Array) -> Int64Array:
    return ends[np.maximum(at, 0)] if ends.size else np.full(at.size, -1, dtype=np.int64)
