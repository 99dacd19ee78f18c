"""The order of a unit's bytes in a chunk: one side's runs follow one another without gaps, and are long there.

Both processes derive it from the two layouts, so nobody tells it. Copies of a half are merged and folded into runs.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from math import gcd
from typing import NamedTuple

import numpy as np

from kvplan.layout.strides import Int64Array, Loop
from kvplan.program.program import BlockAxis, Run, RunGroup

GRAIN = 256  # bytes: slots begin at multiples of this
REACH = 1 << 48  # bytes: more than the addresses of a process
WORD = 16  # bytes: the widest word of a kernel
COPY = 128  # bytes that could be moved in the time that one copy takes besides its bytes
WHOLE = 16  # a unit of more than this part of a slot is cut, so that a chunk fills its slot but for this part


class Copies(NamedTuple):
    """The copies of one unit, in the order of the chunk: three int64 arrays.

    Attributes:
        src, dst: offsets in bytes from the unit's address on each side.
        size: bytes.
    """

    src: Int64Array
    dst: Int64Array
    size: Int64Array

    @property
    def at(self) -> Int64Array:
        """Offsets in the unit's bytes in the chunk."""
        made: Int64Array = np.cumsum(self.size) - self.size
        return made

    def take(self, some: Int64Array) -> Copies:
        """Return some of the copies, in the order given."""
        return Copies(self.src[some], self.dst[some], self.size[some])


class Place(NamedTuple):
    """The addresses that the units of one side may have: ``residue`` and any multiple of ``step``.

    Attributes:
        step, residue: in bytes.
    """

    step: int
    residue: int

    @classmethod
    def of(cls, axis: BlockAxis, base: int) -> Place:
        """Return the place of a side of a run group.

        >>> Place.of(BlockAxis(((8, 4096),), None, (0, 1024), 8), 4096 + 512)
        Place(step=1024, residue=512)
        """
        step = axis.step() or 1 << 30
        return cls(step, base % step)

    @property
    def axis(self) -> BlockAxis:
        """An axis of every address that is possible."""
        return BlockAxis(((REACH // self.step, self.step),), None, (0,), REACH // self.step)


@dataclass(frozen=True, eq=False)
class Section:
    """Units of one size in chunks: the run groups of both halves. It is kept, so a GPU uploads its tables once.

    Attributes:
        unit_nbytes: bytes of a unit in a chunk.
        src: run group from the source to the chunk.
        dst: run group from the chunk to the destination.
    """

    unit_nbytes: int
    src: RunGroup
    dst: RunGroup

    @property
    def grain(self) -> int:
        """Largest power of two, at most 256, that divides a unit's bytes. No run group is aligned to more.

        Sections come in its order, the largest first. So units of any number leave the next ones aligned.
        """
        return power(self.unit_nbytes, GRAIN)


def power(number: int, most: int) -> int:
    """Return the largest power of two, at most ``most``, that divides a number.

    >>> power(96, 16), power(96, 256), power(0, 16)
    (16, 32, 16)
    """
    return min(number & -number, most) if number else most


# The sections of a run group are kept as long as the run group, so that their run tables are uploaded once.
_known: weakref.WeakKeyDictionary[RunGroup, dict[int, tuple[Section, ...]]] = weakref.WeakKeyDictionary()


def sections_of(group: RunGroup, most: int) -> tuple[Section, ...]:
    """Order the copies of a run group's unit for both halves, by the side with which the halves cost the least.

    Args:
        group: the run group.
        most: bytes of a slot. A unit of over a sixteenth of it is several sections, cut at runs if they are short.

    >>> from kvplan.program.program import Run
    >>> axis = BlockAxis(((8, 64),), None, (0,), 8)
    >>> group = RunGroup(axis, axis, 0, 0, (Run(0, 0, 8, ((4, 16, 8), (2, 8, 32))),))
    >>> [section] = sections_of(group, 1 << 16)
    >>> section.unit_nbytes, section.src.runs, section.dst.runs
    (64, (Run(src=0, dst=0, nbytes=8, loops=((2, 8, 32), (4, 16, 8))),), (Run(src=0, dst=0, nbytes=64, loops=()),))
    """
    known = _known.get(group)
    if known is None:
        known = _known.setdefault(group, {})
    sections = known.get(most)
    return known.setdefault(most, _sections(group, most)) if sections is None else sections


def _sections(group: RunGroup, most: int) -> tuple[Section, ...]:
    places = Place.of(group.src, group.src_base), Place.of(group.dst, group.dst_base)
    copies = Copies(*group.offsets)
    ways = [[copies.take(np.lexsort(keys))] for keys in ((copies.src, copies.dst), (copies.dst, copies.src))]
    ways += [split for way in ways if (split := _by_alignment(way[0]))]
    best = min(ways, key=lambda way: sum(_cost(copies, places) for copies in way))
    return tuple(_section(piece, places) for copies in best for piece in _pieces(copies, most))


def _by_alignment(copies: Copies) -> list[Copies]:
    """Part copies by the alignment of their sizes, widest first, so that narrow ones slow no others; [] if alike."""
    word = np.minimum(copies.size & -copies.size, WORD)
    words = np.unique(word)[::-1]
    return [copies.take(np.flatnonzero(word == one)) for one in words.tolist()] if words.size > 1 else []


def _cost(copies: Copies, places: tuple[Place, Place]) -> float:
    """Return what both halves cost, in bytes of one that is aligned and contiguous."""
    total, nbytes, at = 0.0, int(copies.size.sum()), copies.at
    for offsets, place in zip(copies[:2], places, strict=True):
        cache, chunk, size = merged(offsets, at, copies.size)
        common = int(np.gcd.reduce(np.concatenate((cache, chunk, size))))
        word = power(gcd(common, nbytes, place.step, place.residue), WORD)
        total += COPY * size.size + nbytes * max(1.0, WORD / 2 / word)
    return total


def _pieces(copies: Copies, most: int) -> list[Copies]:
    """Cut a unit that is too large for a slot into pieces of about equal bytes, between copies unless they are long."""
    nbytes = int(copies.size.sum())
    target = max(most // WHOLE // GRAIN * GRAIN, min(most, GRAIN))
    if nbytes <= target:
        return [copies]
    count = -(-nbytes // target)
    each = -(-nbytes // count // GRAIN) * GRAIN or nbytes
    at = copies.at
    edges = np.arange(each, nbytes, each, dtype=np.int64)
    inside = np.searchsorted(at, edges, side="right") - 1
    if each + each // 2 <= most:
        edges = np.unique(np.where(copies.size[inside] <= each // 2, at[inside], edges))
    return _cut(copies, edges[edges > 0])


def _cut(copies: Copies, edges: Int64Array) -> list[Copies]:
    """Cut copies at offsets of the chunk."""
    at = copies.at
    bounds = np.unique(np.concatenate((at, edges)))
    size = np.diff(np.append(bounds, at[-1] + copies.size[-1]))
    owner = np.searchsorted(at, bounds, side="right") - 1
    within = bounds - at[owner]
    cut = Copies(copies.src[owner] + within, copies.dst[owner] + within, size)
    ends = np.searchsorted(bounds, edges)
    return [cut.take(part) for part in np.split(np.arange(bounds.size), ends)]


def _section(copies: Copies, places: tuple[Place, Place]) -> Section:
    at, nbytes = copies.at, int(copies.size.sum())
    count = REACH // nbytes
    chunk = BlockAxis(((count, nbytes),), None, (0,), count)
    from_src, from_dst = (folded(*merged(offsets, at, copies.size)) for offsets in copies[:2])
    gathers = tuple(sorted(from_src, key=lambda run: run.dst))
    swapped = [
        Run(run.dst, run.src, run.nbytes, tuple([(count, there, here) for count, here, there in run.loops]))
        for run in from_dst
    ]
    scatters = tuple(sorted(swapped, key=lambda run: (run.dst, run.src)))
    src, dst = places
    return Section(
        nbytes,
        RunGroup(src.axis, chunk, src.residue, GRAIN, gathers),
        RunGroup(chunk, dst.axis, GRAIN, dst.residue, scatters),
    )


def merged(cache: Int64Array, chunk: Int64Array, size: Int64Array) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Join copies that follow one another on both sides. The copies are in the order of the chunk.

    >>> merged(np.array([0, 8, 32]), np.array([0, 8, 16]), np.array([8, 8, 8]))
    (array([ 0, 32]), array([ 0, 16]), array([16,  8]))
    """
    touch = (cache[1:] == cache[:-1] + size[:-1]) & (chunk[1:] == chunk[:-1] + size[:-1])
    first = np.concatenate(([0], np.flatnonzero(~touch) + 1))
    return cache[first], chunk[first], np.add.reduceat(size, first)


class _Rows(NamedTuple):
    """Runs under construction: arrays of their first offsets and bytes, and of each loop's (count, strides)."""

    cache: Int64Array
    chunk: Int64Array
    size: Int64Array
    loops: Int64Array  # (n, 3 * loops), outermost first

    @property
    def alike(self) -> Int64Array:
        """Rows of which each is equal to another whose runs have the same bytes and loops."""
        return np.column_stack((self.size, self.loops))


def folded(cache: Int64Array, chunk: Int64Array, size: Int64Array) -> list[Run]:
    """Fold equally spaced copies into runs with at most two loops; ``src`` is the offset at the unit.

    >>> folded(np.array([0, 32, 64, 8, 40, 72]), np.arange(6) * 4, np.full(6, 4))
    [Run(src=0, dst=0, nbytes=4, loops=((2, 8, 12), (3, 32, 4)))]
    """
    rows = _Rows(cache, chunk, size, np.empty((size.size, 0), dtype=np.int64))
    for _ in range(2):
        rows = _fold(rows)
    made = []
    for first, at, nbytes, *flat in np.column_stack((rows.cache, rows.chunk, rows.size, rows.loops)).tolist():
        every: list[Loop] = [(flat[k], flat[k + 1], flat[k + 2]) for k in range(0, len(flat), 3)]
        made.append(Run(first, at, nbytes, tuple([loop for loop in every if loop[0] > 1])))
    return made


def _fold(rows: _Rows) -> _Rows:
    """Make one more loop, the outermost, of stretches of at least three rows, or of equal stretches everywhere."""
    count = rows.size.size
    if count < 2:
        return rows
    alike, steps = rows.alike, np.stack((np.diff(rows.cache), np.diff(rows.chunk)), axis=1)
    same = (alike[1:] == alike[:-1]).all(axis=1)
    if same.all():
        apart = np.flatnonzero((steps != steps[0]).any(axis=1))
        each = int(apart[0]) + 1 if apart.size else count
        inner = np.arange(count - 1) % each < each - 1
        if count % each == 0 and each > 1 and (steps[inner] == steps[0]).all():
            return _looped(rows, np.arange(0, count, each), np.full(count // each, each), steps)
    # The links between rows: equal links in a row are a stretch; it begins behind the last row of the one before.
    equal = same[1:] & same[:-1] & (steps[1:] == steps[:-1]).all(axis=1)
    first = np.concatenate(([0], np.flatnonzero(~equal) + 1))
    links = np.diff(np.append(first, count - 1))
    kept = same[first] & (links > 1)
    begin, length = first[kept], links[kept] + 1
    if begin.size:
        shared = np.concatenate(([False], begin[1:] == (begin + length - 1)[:-1]))
        begin, length = begin + shared, length - shared
    covered = np.zeros(count + 1, dtype=np.int64)
    np.add.at(covered, begin, 1)
    np.add.at(covered, begin + length, -1)
    alone = np.flatnonzero(np.cumsum(covered)[:count] == 0)
    begin, length = np.concatenate((begin, alone)), np.concatenate((length, np.ones_like(alone)))
    order = np.argsort(begin)
    return _looped(rows, begin[order], length[order], steps)


def _looped(rows: _Rows, begin: Int64Array, length: Int64Array, steps: Int64Array) -> _Rows:
    strides = np.where((length > 1)[:, None], steps[np.minimum(begin, len(steps) - 1)], 0)
    loops = np.column_stack((length, strides, rows.loops[begin]))
    return _Rows(rows.cache[begin], rows.chunk[begin], rows.size[begin], loops)
