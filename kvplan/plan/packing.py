"""Pack units in rings: whole granules in the order of the host, or sections in the order of one side.

**Staging**, for a transfer between host and GPU. A granule is a host block if possible, otherwise a unit. Its extents
(contiguous byte ranges on the host) follow one another in the ring. A copy between host and cache becomes two copies:
an extent between host and ring, and a run between ring and cache.

**Sections**, for a transfer between processes. One side's runs follow one another without gaps, and are long there.
Both processes derive the order from the two layouts, so nobody tells it.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from math import gcd
from typing import NamedTuple

import numpy as np

from kvplan.base.process import cached_property
from kvplan.layout.strides import Int64Array
from kvplan.program.passes import limit_loops, merge_and_fold
from kvplan.program.program import BlockAxis, Run, RunGroup, merge_ranges

GRAIN = 256  # bytes: extents, granules and slots begin at multiples of this


@dataclass(frozen=True, eq=False)
class Staging:
    """The places of one run group's units in a ring, and the copies to and from the ring.

    Attributes:
        granule_units: units per granule: all units of a host block, or one.
        unit_hosts: bytes from a granule's host address to the host address of each of its units.
        unit_rings: bytes from a granule's ring address to the address at which each unit's run offsets begin.
        runs: (3, n) int64, for every copy of one unit: offset in the ring, offset in the cache, bytes.
        extents: (3, m) int64, for every extent of a whole granule: bytes from the granule's host address, bytes from
            its ring address, bytes.
        nbytes: bytes of a granule in the ring, padding included.
        alignment: largest power of two that divides every address and size that the ring's kernel uses.
        host: (2, n) int64, for every copy of one unit: offset on the host, bytes.
    """

    granule_units: int
    unit_hosts: Int64Array
    unit_rings: Int64Array
    runs: Int64Array
    extents: Int64Array
    nbytes: int
    alignment: int
    host: Int64Array

    def part(self, first: int, last: int) -> Int64Array:
        """Return the extents (3, m) of units ``first`` to ``last``, at their offsets in the whole granule."""
        if last - first == self.granule_units:
            return self.extents
        made = self._parts.get((first, last))
        if made is None:
            host, size = self.host
            starts = (self.unit_hosts[first:last, None] + host).ravel()
            begin, length = merge_ranges(starts, np.tile(size, last - first))
            at = np.searchsorted(self.extents[0], begin, side="right") - 1
            made = self._parts[first, last] = np.stack(
                (begin, self.extents[1, at] + begin - self.extents[0, at], length)
            )
        return made

    @cached_property
    def _parts(self) -> dict[tuple[int, int], Int64Array]:
        return {}


def stage(group: RunGroup, *, host_is_src: bool) -> Staging:
    """Place the runs of a run group in a ring.

    A host block is one granule if the runs of all its units keep their distances in the ring. That is so if the units
    of a block are contiguous together, or if each unit is contiguous.

    >>> import kvplan
    >>> gpu = kvplan.KVLayout.from_tensors("layer block token dim", np.zeros((2, 8, 16, 64), np.int8))
    >>> host = kvplan.KVLayout.from_tensors("block layer token dim", np.zeros((2, 2, 64, 64), np.int8))
    >>> made = stage(kvplan.compile(gpu, host).program.groups[0], host_is_src=False)
    >>> made.granule_units, made.extents[2], made.runs.tolist()
    (4, array([8192]), [[0, 4096], [0, 8192], [1024, 1024]])
    """
    src, dst, size = group.packed
    host, cache = (src, dst) if host_is_src else (dst, src)
    axis, there = (group.src, group.dst) if host_is_src else (group.dst, group.src)
    steps = gcd(there.step(), group.dst_base if host_is_src else group.src_base, GRAIN)
    units = np.array(axis.units, dtype=np.int64)
    return _stage(steps, units, host, cache, size)


def _stage(steps: int, units: Int64Array, host: Int64Array, cache: Int64Array, size: Int64Array) -> Staging:
    """Place these units in the ring as one granule. If they do not keep their distances, a granule is one unit."""
    starts = (units[:, None] + host).ravel()
    at, lengths = merge_ranges(starts, np.tile(size, units.size))
    padded = -(-lengths // GRAIN) * GRAIN
    rings = np.cumsum(padded) - padded
    index = np.searchsorted(at, starts, side="right") - 1
    places = (rings[index] + starts - at[index]).reshape(units.size, -1)
    moved = places[:, 0] - places[0, 0]
    if np.any(places != places[0] + moved[:, None]):  # never true for one unit
        return _stage(steps, np.zeros(1, dtype=np.int64), host, cache, size)
    runs = np.stack((places[0], cache, size))
    common = int(np.gcd.reduce(np.concatenate([runs.ravel(), moved, [steps]])))
    extents = np.stack((at, rings, lengths))
    return Staging(units.size, units, moved, runs, extents, int(padded.sum()), common & -common, np.stack((host, size)))


_stagings: weakref.WeakKeyDictionary[RunGroup, dict[bool, Staging]] = weakref.WeakKeyDictionary()


def staging_of(group: RunGroup, direction: str) -> Staging:
    """Return the staging of a run group for a ``"load"`` or another direction. It is kept with the run group.

    >>> import kvplan
    >>> layout = kvplan.KVLayout.from_tensors("layer block token dim", np.zeros((2, 8, 16, 64), np.int8))
    >>> group = kvplan.compile(layout, layout).program.groups[0]
    >>> staging_of(group, "load") is staging_of(group, "load")
    True
    """
    load, made = direction == "load", _stagings.get(group)
    if made is None:
        made = _stagings.setdefault(group, {})
    if load not in made:
        made[load] = stage(group, host_is_src=load)
    return made[load]


# ---- sections -------------------------------------------------------------------------------------------------------

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
    """The addresses that the units of one side may have: ``residue`` and any multiple of ``step``, in bytes."""

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
_ordered: weakref.WeakKeyDictionary[RunGroup, dict[int, tuple[Section, ...]]] = weakref.WeakKeyDictionary()


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
    known = _ordered.get(group)
    if known is None:
        known = _ordered.setdefault(group, {})
    sections = known.get(most)
    return known.setdefault(most, _sections(group, most)) if sections is None else sections


def _sections(group: RunGroup, most: int) -> tuple[Section, ...]:
    places = Place.of(group.src, group.src_base), Place.of(group.dst, group.dst_base)
    copies = Copies(*group.packed)
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
    chunk, (src, dst) = BlockAxis.multiples(int(copies.size.sum())), places
    from_cache, at, nbytes = merged(copies.src, copies.at, copies.size)
    gathers = _folded(from_cache, at, nbytes)
    to_cache, at, nbytes = merged(copies.dst, copies.at, copies.size)
    scatters = _folded(at, to_cache, nbytes)
    return Section(
        int(copies.size.sum()),
        RunGroup(BlockAxis.multiples(src.step), chunk, src.residue, GRAIN, gathers),
        RunGroup(chunk, BlockAxis.multiples(dst.step), GRAIN, dst.residue, scatters),
    )


def _folded(src: Int64Array, dst: Int64Array, size: Int64Array) -> tuple[Run, ...]:
    """Fold copies into runs as the compiler does, in order of their destination."""
    rows = zip(src.tolist(), dst.tolist(), size.tolist(), strict=True)
    runs = limit_loops(merge_and_fold([Run(*row, ()) for row in rows]))
    return tuple(sorted(runs, key=lambda run: (run.dst, run.src)))


def merged(cache: Int64Array, chunk: Int64Array, size: Int64Array) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Join copies that follow one another on both sides. The copies are in the order of the chunk.

    >>> merged(np.array([0, 8, 32]), np.array([0, 8, 16]), np.array([8, 8, 8]))
    (array([ 0, 32]), array([ 0, 16]), array([16,  8]))
    """
    touch = (cache[1:] == cache[:-1] + size[:-1]) & (chunk[1:] == chunk[:-1] + size[:-1])
    first = np.concatenate(([0], np.flatnonzero(~touch) + 1))
    return cache[first], chunk[first], np.add.reduceat(size, first)
