"""Copy programs: run groups of plain integers, as the compiler makes them."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd, prod
from typing import NamedTuple

import numpy as np

from kvplan.base.numbers import binary, count_of, exact
from kvplan.base.process import cached_property
from kvplan.layout.strides import Factors, Int64Array, Loop, offsets_of


def merge_adjacent(src: Int64Array, dst: Int64Array, size: Int64Array) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Join copies that are adjacent on both sides; such copies have equal ``dst - src``.

    >>> merge_adjacent(np.array([8, 0, 4]), np.array([108, 100, 50]), np.array([8, 8, 4]))
    (array([4, 0]), array([ 50, 100]), array([ 4, 16]))
    """
    if not src.size:
        return src, dst, size
    order = np.lexsort((src, dst - src))
    src, dst, size = src[order], dst[order], size[order]
    apart = (src[1:] != src[:-1] + size[:-1]) | (dst[1:] != dst[:-1] + size[:-1])
    first = np.concatenate(([0], np.flatnonzero(apart) + 1))
    return src[first], dst[first], np.add.reduceat(size, first)


def merge_ranges(start: Int64Array, size: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Join disjoint byte ranges that touch; return their first bytes, ascending, and their lengths.

    >>> merge_ranges(np.array([8, 0, 40]), np.array([8, 8, 4]))
    (array([ 0, 40]), array([16,  4]))
    """
    order = np.argsort(start, kind="stable")
    first, last = start[order], (start + size)[order]
    cuts = np.flatnonzero(first[1:] != last[:-1]) + 1
    begin = np.concatenate((first[:1], first[cuts]))
    return begin, np.concatenate((last[cuts - 1], last[-1:])) - begin


REACH = 1 << 48  # bytes: more than the addresses of a process


class Extents(NamedTuple):
    """The maximal contiguous byte ranges of a unit on one side.

    Attributes:
        count: their number.
        min_nbytes, max_nbytes: bytes of the smallest and of the largest.
    """

    count: int  # type: ignore[assignment]  # a tuple has a method of this name
    min_nbytes: int
    max_nbytes: int

    def __str__(self) -> str:
        low, high = self.min_nbytes, self.max_nbytes
        return f"{count_of(self.count, 'extent')} of {binary(high) if low == high else f'{low:,} to {exact(high)}'}"


class Run(NamedTuple):
    """Equal contiguous copies of one unit.

    Attributes:
        src, dst: bytes from the unit's address to the first copy.
        nbytes: bytes of each copy.
        loops: (count, source stride, destination stride), strides in bytes, outermost first; at most two in a program.
    """

    src: int
    dst: int
    nbytes: int
    loops: tuple[Loop, ...]

    @property
    def copies(self) -> int:
        """Number of copies."""
        return prod(count for count, _, _ in self.loops)


class BlockAxis(NamedTuple):
    """The positions of the units of one side: ``base + block offset + unit offset``.

    Attributes:
        factors: factors of the block axis, strides in bytes; ignored if there is a ``table``.
        table: bytes from block 0 to each block, or None.
        units: bytes from a block to each unit inside it.
        num_blocks: number of blocks.
    """

    factors: Factors
    table: tuple[int, ...] | None
    units: tuple[int, ...]
    num_blocks: int

    @classmethod
    def multiples(cls, step: int) -> BlockAxis:
        """Return an axis whose blocks are all multiples of a step, one unit each.

        >>> BlockAxis.multiples(4096).stride
        4096
        """
        return cls(((REACH // step, step),), None, (0,), REACH // step)

    @property
    def stride(self) -> int | None:
        """Bytes from block to block; None if there is no single number."""
        if self.table is not None or len(self.factors) > 1:
            return None
        return self.factors[0][1] if self.factors else 0

    def block_offsets(self) -> Int64Array:
        """Return the bytes from block 0 to each block."""
        if self.table is not None:
            return np.array(self.table, dtype=np.int64)
        if self.stride is not None:
            return np.arange(self.num_blocks, dtype=np.int64) * self.stride
        return offsets_of(self.factors)

    def step(self) -> int:
        """Return the greatest common divisor of all distances between units; 0 if there is only one unit."""
        if self.table is not None:
            between = gcd(*self.table)
        else:
            between = gcd(*(stride for count, stride in self.factors if count > 1))
        return gcd(between, *self.units)


@dataclass(frozen=True, eq=False)
class RunGroup:
    """Runs that share the distances between units, on both sides.

    Attributes:
        src, dst: positions of the units of each side, relative to the bases.
        src_base, dst_base: address of unit 0 of block 0, chosen so that no run has a negative offset.
        runs: the copies of one unit, in order of destination.
    """

    src: BlockAxis
    dst: BlockAxis
    src_base: int
    dst_base: int
    runs: tuple[Run, ...]

    @cached_property
    def table(self) -> Int64Array:
        """The runs as (n, 9) int64: src, dst, nbytes, and for two loops: count, source stride, destination stride."""
        rows = []
        for run in self.runs:
            loops = ((1, 0, 0),) * (2 - len(run.loops)) + run.loops
            rows.append((run.src, run.dst, run.nbytes, *loops[0], *loops[1]))
        return np.array(rows, dtype=np.int64).reshape(-1, 9)

    @cached_property
    def packed(self) -> Int64Array:
        """Source offset, destination offset and bytes of every copy of one unit, loops expanded: (3, copies) int64.

        Copies of neighbouring steps of a loop may touch on both sides: the last row of a box and the first of the next.
        Such copies are one copy here, which a list can express and a loop cannot.
        """
        columns = []
        for run in self.runs:
            src, dst = np.array([run.src], dtype=np.int64), np.array([run.dst], dtype=np.int64)
            for count, src_stride, dst_stride in run.loops:
                steps = np.arange(count, dtype=np.int64)
                src, dst = ((at[:, None] + steps * by).ravel() for at, by in ((src, src_stride), (dst, dst_stride)))
            columns.append(np.stack((src, dst, np.full_like(src, run.nbytes))))
        made = np.concatenate(columns, axis=1)
        merged = merge_adjacent(*made)
        return made if merged[0].size == made.shape[1] else np.stack(merged)

    @cached_property
    def runs_by_size(self) -> tuple[tuple[int, Int64Array], ...]:
        """For each size of a copy: the bytes, and the offsets (3, copies) of all copies of that size."""
        return tuple((nbytes, np.ascontiguousarray(self.packed[:, self.packed[2] == nbytes])) for nbytes in self.sizes)

    @cached_property
    def chainable(self) -> bool:
        """Whether a run can touch itself in another unit: the distances between units divide its size on both sides."""
        steps = (self.src.step(), self.dst.step())
        return all(steps) and any(nbytes % steps[0] == 0 and nbytes % steps[1] == 0 for nbytes in self.sizes)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The different sizes of the copies of one unit, in bytes."""
        return tuple(np.unique(self.packed[2]).tolist())

    @cached_property
    def nbytes(self) -> int:
        """Bytes per unit."""
        return sum(run.nbytes * run.copies for run in self.runs)

    @cached_property
    def alignment(self) -> int:
        """Largest power of two that divides every address, stride and size of every copy."""
        common = gcd(self.src.step(), self.src_base, self.dst.step(), self.dst_base)
        for run in self.runs:
            common = gcd(common, run.src, run.dst, run.nbytes)
            common = gcd(common, *(stride for loop in run.loops for stride in loop[1:]))
        return common & -common

    @cached_property
    def hulls(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """For each side: first byte of a unit, and the byte after its last, relative to the unit's address."""
        src, dst, size = self.packed
        return (int(src.min()), int((src + size).max())), (int(dst.min()), int((dst + size).max()))


@dataclass(frozen=True, eq=False)
class Program:
    """A compiled pair of layouts: pure integers, no memory.

    Attributes:
        unit_tokens: token slots per unit, the largest piece of which whole blocks of both sides consist.
        src_units, dst_units: units per block of each side. A skip counts units and is less than this number.
        groups: the runs, by distances between units.
        opaque: whether all content is opaque, so that ``unit_tokens`` counts sub-blocks.
    """

    unit_tokens: int
    src_units: int
    dst_units: int
    groups: tuple[RunGroup, ...]
    opaque: bool = False

    @property
    def units(self) -> tuple[int, int, int]:
        """Token slots per unit, and units per block of each side."""
        return self.unit_tokens, self.src_units, self.dst_units

    @cached_property
    def unit_words(self) -> str:
        """The size of a unit in words: ``16 tokens``, ``1 sub-block``, or ``1 whole block`` of one sub-block."""
        if self.opaque and self.unit_tokens == self.src_units == self.dst_units == 1:
            return "1 whole block"
        return f"{self.unit_tokens} {'sub-block' if self.opaque else 'token'}{'s' * (self.unit_tokens != 1)}"

    @cached_property
    def unit_nbytes(self) -> int:
        """Bytes per unit."""
        return sum(group.nbytes for group in self.groups)

    @cached_property
    def runs(self) -> int:
        """Contiguous copies per unit, as the loops have them; a list of descriptors may merge some of them."""
        return sum(run.copies for group in self.groups for run in group.runs)

    @cached_property
    def run_nbytes(self) -> tuple[int, int]:
        """Bytes of the smallest and of the largest copy."""
        sizes = [run.nbytes for group in self.groups for run in group.runs]
        return min(sizes), max(sizes)

    @cached_property
    def alignment(self) -> int:
        """Largest power of two that divides every address, stride and size of every copy."""
        common = gcd(*(group.alignment for group in self.groups))
        return common & -common

    def extents(self, side: str) -> Extents:
        """Return the number of maximal contiguous byte ranges per unit on one side, and their least and most bytes.

        Args:
            side: ``"src"`` or ``"dst"``.
        """
        # Run groups of equal distances between units on this side lie in one block of it, whatever the other has.
        blocks: dict[BlockAxis, list[tuple[Int64Array, Int64Array]]] = {}
        for group in self.groups:
            src, dst, size = group.packed
            axis, start = (group.src, src + group.src_base) if side == "src" else (group.dst, dst + group.dst_base)
            blocks.setdefault(axis, []).append((start, size))
        lengths: list[int] = []
        for held in blocks.values():
            start, size = (np.concatenate(column) for column in zip(*held, strict=True))
            lengths.extend(merge_ranges(start, size)[1].tolist())
        return Extents(len(lengths), min(lengths), max(lengths))
