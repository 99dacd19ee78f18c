"""Checks of a recipe's addresses: they lie in offered memory, and no byte is written twice.

The checks look at each unit once, and at each run of one unit once, unless blocks are spread over separate allocations.
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
from kvplan.plan.packing import column_loops

TILE = 1 << 20  # ranges that are checked at once
SPARSE, EACH = 1 << 18, 32  # bytes for marks of indices, and bytes for each unit; if they take more, they are sorted


class Extents(NamedTuple):
    """The bytes of a unit at its own side.

    Attributes:
        start: first bytes, ascending, relative to the unit's address.
        size: bytes of each.
        twice: whether some byte belongs to two copies.
    """

    start: Int64Array
    size: Int64Array
    twice: bool


class Column(NamedTuple):
    """The addresses of units, and their indices.

    Attributes:
        addresses: (n,) int64: the first address, and ``step * indices`` bytes from it.
        indices: (n,) int64, for units that are written; otherwise it may be empty.
        step: in bytes.
        root: number of the column with these indices.
        period: bytes from block to block, as the recipe says; a hint.
        low, high: lowest and highest address; 0 without units.
    """

    addresses: Int64Array
    indices: Int64Array
    step: int
    root: int
    period: int
    low: int
    high: int


def extents_of(start: Int64Array, size: Int64Array) -> Extents:
    """Join byte ranges that touch or overlap.

    >>> extents_of(np.array([8, 0, 4, 40]), np.array([8, 6, 4, 2]))
    Extents(start=array([ 0, 40]), size=array([16,  2]), twice=True)
    """
    order = np.argsort(start, kind="stable")
    first, last = start[order], (start + size)[order]
    reach = np.maximum.accumulate(last)
    cuts = np.flatnonzero(first[1:] > reach[:-1]) + 1
    begin = np.concatenate((first[:1], first[cuts]))
    end = np.concatenate((reach[cuts - 1], reach[-1:]))
    return Extents(begin, end - begin, bool((first[1:] < reach[:-1]).any()))


def joined(several: Sequence[tuple[Extents, int]]) -> Extents:
    """Join the extents of several units, each that many bytes further on."""
    if len(several) == 1 and not several[0][1]:
        return several[0][0]
    start = np.concatenate([extents.start + far for extents, far in several])
    both = extents_of(start, np.concatenate([extents.size for extents, _ in several]))
    return Extents(both.start, both.size, both.twice or any(extents.twice for extents, _ in several))


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


# ---- no byte is written twice ------------------------------------------------------------------------------------


class _Ranges(NamedTuple):
    """Byte ranges: first bytes and ends."""

    start: Int64Array
    end: Int64Array

    @property
    def disjoint(self) -> bool:
        """Whether no byte is in two of them."""
        order = np.argsort(self.start)
        return bool((self.start[order][1:] >= self.end[order][:-1]).all())


def check_disjoint(held: Sequence[tuple[Column, Extents]]) -> None:
    """Check that no byte is in two extents, of all units of all columns.

    Raises:
        TransferError: a byte is in two extents; or that cannot be ruled out with bounded work.
    """
    roots: dict[int, tuple[Column, list[tuple[Extents, int]]]] = {}
    for column, extents in held:
        if column.addresses.size:
            first, several = roots.setdefault(column.root, (column, []))
            several.append((extents, int(column.addresses[0]) - int(first.addresses[0])))
    every = [(column, joined(several)) for column, several in roots.values()]
    sweeps = [_sweeps(column, extents) for column, extents in every]
    if len(sweeps) > 1:
        _check_apart(every, sweeps)


def _check_apart(held: list[tuple[Column, Extents]], sweeps: list[_Ranges]) -> None:
    """Check that different columns have no byte in common; only those are looked into whose reaches overlap."""
    start, end = np.concatenate([one.start for one in sweeps]), np.concatenate([one.end for one in sweeps])
    owner = np.repeat(np.arange(len(sweeps)), [one.start.size for one in sweeps])
    order = np.argsort(start)
    reach = np.maximum.accumulate(end[order])
    cuts = np.concatenate(([0], np.flatnonzero(start[order][1:] >= reach[:-1]) + 1))
    owner = owner[order]
    alone = np.minimum.reduceat(owner, cuts) == np.maximum.reduceat(owner, cuts)
    close = np.unique(owner[np.repeat(~alone, np.diff(np.append(cuts, owner.size)))]).tolist()
    if close:
        every = [_every(*held[number]) for number in close]
        whole = _Ranges(*(np.concatenate(column) for column in zip(*every, strict=True)))
        if not whole.disjoint:
            raise _twice()


def _twice() -> TransferError:
    return TransferError("a recipe from a peer writes a byte twice; each destination is written once")


def _every(column: Column, extents: Extents) -> _Ranges:
    """Return all extents of all units."""
    count = column.addresses.size * extents.start.size
    if count > LIMITS.recipe_work:
        raise TransferError(
            f"a recipe from a peer takes {count:,} ranges of memory to check, and at most {LIMITS.recipe_work:,} are; "
            "ask for fewer blocks at once"
        )
    start = (column.addresses[:, None] + extents.start).ravel()
    return _Ranges(start, start + np.tile(extents.size, column.addresses.size))


def _sweeps(column: Column, extents: Extents) -> _Ranges:
    """Check that no two units of a column share a byte; return ranges that hold all their bytes."""
    addresses, index, low, high = column.addresses, column.indices, column.low, column.high
    if extents.twice or (index.size > 1 and _repeats(column)):
        raise _twice()
    if index.size == 1:
        return _Ranges(extents.start + low, extents.start + extents.size + low)
    hull = int(extents.start[-1] + extents.size[-1] - extents.start[0])
    if hull <= column.step:  # as of whole blocks, so that different units cannot meet
        return _Ranges(extents.start[:1] + low, extents.start[-1:] + extents.size[-1:] + high)
    for period in (column.period, column.step):
        found = None if period % column.step else _in_periods(column, extents, period)
        if found is not None:
            return found
    ordered = np.sort(addresses)
    if int(np.diff(ordered).min()) < hull and not _every(column, extents).disjoint:
        raise _twice()
    return _Ranges(extents.start[:1] + low, extents.start[-1:] + extents.size[-1:] + high)


def _repeats(column: Column) -> bool:
    """Return whether a unit stands twice."""
    index, span = column.indices, (column.high - column.low) // column.step
    if span > 8 * (SPARSE + EACH * index.size):
        return np.unique(index).size != index.size
    low = int(index[0]) - (int(column.addresses[0]) - column.low) // column.step
    seen = np.zeros((span >> 3) + 1, np.uint8)
    return any(column_loops.is_repeated(index[some], low, seen) for some in column_loops.pieces(index.size))


def _distinct(index: Int64Array) -> Int64Array:
    """Return the different indices, ascending."""
    low, high = int(index.min()), int(index.max())
    if high - low > SPARSE + EACH * index.size:
        return np.unique(index)
    seen = np.zeros(high - low + 1, dtype=np.bool_)
    seen[index - low] = True
    return np.flatnonzero(seen) + low


def _in_periods(column: Column, extents: Extents, period: int) -> _Ranges | None:
    """Check units as blocks at multiples of a period, each with units inside it; None if that shows nothing.

    All units that any block has are taken for units of every block. Their extents are cut to clusters, so far apart
    that no other block's bytes reach from one to the next. In a cluster, bytes must differ modulo the period.
    """
    index, step = column.indices, column.step
    every = period // step
    blocks = index // every
    inside = _distinct(index - blocks * every) if every > 1 else np.zeros(1, dtype=np.int64)
    if inside.size * extents.start.size > LIMITS.recipe_work // 4:
        return None
    start = (inside[:, None] * step + extents.start).ravel()
    size = np.tile(extents.size, inside.size)
    order = np.argsort(start)
    start, size = start[order], size[order]
    end = start + size
    if bool((start[1:] < end[:-1]).any()) or bool((size > period).any()):
        return None
    first, last = int(blocks.min()), int(blocks.max())
    far = (last - first) * period
    apart = start[1:] >= end[:-1] + far
    cluster = np.concatenate(([0], np.cumsum(apart)))
    if far:
        rest = start % period
        order = np.lexsort((rest, cluster))
        here, begin, stop = cluster[order], rest[order], (rest + size)[order]
        alike = here[1:] == here[:-1]
        if bool((begin[1:] < stop[:-1])[alike].any()):
            return None
        edges = np.concatenate(([0], np.flatnonzero(~alike) + 1))
        if bool((np.append(stop[edges[1:] - 1], stop[-1]) > begin[edges] + period).any()):  # around the end of a period
            return None
    edges = np.concatenate(([0], np.flatnonzero(apart) + 1))
    base = int(column.addresses[0]) - int(index[0]) * step + first * period
    return _Ranges(base + start[edges], base + np.append(end[edges[1:] - 1], end[-1]) + far)
