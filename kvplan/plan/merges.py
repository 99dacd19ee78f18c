"""Find the merges across units that a program allows: a run of one unit ends where a run of another unit begins.

The compiler has already merged adjacent runs inside a unit. Copies of the same run that touch from unit to unit are
merged while they are written. This module finds the merges of different runs, such as the last row of a block and the
first row of the next block. They depend on the program only, not on block ids; most programs have none.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import gcd
from typing import NamedTuple

import numpy as np

from kvplan.layout.strides import Int64Array
from kvplan.program.program import BlockAxis, RunGroup

# If a program has more candidates or merges than this, it is irregular: sorting its descriptors is faster.
MAX_CANDIDATES = 1 << 20
MAX_MERGES = 256


class Merge(NamedTuple):
    """All pairs of runs that are adjacent if two units have a given distance.

    Attributes:
        before, after: positions of two run groups: of the runs that end, and of the runs that begin there.
        src, dst: bytes from the unit of ``before`` to the unit of ``after``.
        ends: destination offsets, in the unit of ``before``, at which the runs are adjacent.
    """

    before: int
    after: int
    src: int
    dst: int
    ends: Int64Array


@lru_cache(maxsize=64)
def possible_merges(groups: tuple[RunGroup, ...]) -> tuple[Merge, ...] | None:
    """Return every merge that units of these run groups can have; None if there are too many candidates."""
    steps = gcd(*(group.src.step() for group in groups)), gcd(*(group.dst.step() for group in groups))
    src, dst, size = np.concatenate([group.packed for group in groups], axis=1)
    owner = np.repeat(np.arange(len(groups)), [group.packed.shape[1] for group in groups])
    bases = np.array([(group.src_base, group.dst_base) for group in groups], dtype=np.int64)
    src, dst = src + bases[owner, 0], dst + bases[owner, 1]
    start_keys, end_keys = _keys((src, dst), (src + size, dst + size), steps)
    order = np.argsort(start_keys, kind="stable")
    first = np.searchsorted(start_keys[order], end_keys, side="left")
    last = np.searchsorted(start_keys[order], end_keys, side="right")
    matches = last - first
    if int(matches.sum()) > MAX_CANDIDATES:
        return None
    before = np.repeat(np.arange(src.size), matches)
    within = np.arange(matches.sum()) - np.repeat(np.cumsum(matches) - matches, matches)
    after = order[np.repeat(first, matches) + within]
    # From the unit of the run that ends to the unit of the run that begins.
    src_gap = (src + size)[before] - src[after] + bases[owner[after], 0] - bases[owner[before], 0]
    dst_gap = (dst + size)[before] - dst[after] + bases[owner[after], 1] - bases[owner[before], 1]
    # A run that is adjacent to itself is a chain. Two units of one part never have the same destination.
    own = (before == after) | ((owner[before] == owner[after]) & (dst_gap == 0))
    possible = ~own & _within([(g.src, g.src_base) for g in groups], owner[before], owner[after], src_gap)
    possible &= _within([(g.dst, g.dst_base) for g in groups], owner[before], owner[after], dst_gap)
    before, after, src_gap, dst_gap = (column[possible] for column in (before, after, src_gap, dst_gap))
    ends = (dst + size)[before] - bases[owner[before], 1]
    cases = np.stack((owner[before], owner[after], src_gap, dst_gap), axis=1)
    unique, inverse = np.unique(cases, axis=0, return_inverse=True)
    if not len(unique):
        return ()
    if len(unique) > MAX_MERGES:
        return None
    order = np.lexsort((ends, inverse.ravel()))
    cuts = np.searchsorted(inverse.ravel()[order], np.arange(1, len(unique)))
    return tuple(
        Merge(int(case[0]), int(case[1]), int(case[2]), int(case[3]), met)
        for case, met in zip(unique, np.split(ends[order], cuts), strict=True)
    )


_Pairs = tuple[Int64Array, Int64Array]


def _keys(starts: _Pairs, ends: _Pairs, steps: tuple[int, int]) -> tuple[Int64Array, Int64Array]:
    """Number the (source, destination) address pairs, so that pairs that can be equal have equal numbers.

    Addresses are taken modulo the distance between units. If there is only one unit, they are taken unchanged.
    """
    keys = np.zeros(starts[0].size + ends[0].size, dtype=np.int64)
    for start, end, step in zip(starts, ends, steps, strict=True):
        column = np.concatenate((start, end))
        values, ranks = np.unique(column % step if step else column, return_inverse=True)
        keys = keys * values.size + ranks
    return keys[: starts[0].size], keys[starts[0].size :]


def _reach(axis: BlockAxis, base: int) -> tuple[int, int]:
    """Return the lowest and the highest unit address of a side of a run group."""
    offsets = axis.table or (0, sum((count - 1) * stride for count, stride in axis.factors))
    return base + min(offsets) + min(axis.units), base + max(offsets) + max(axis.units)


def _within(
    sides: Sequence[tuple[BlockAxis, int]], before: Int64Array, after: Int64Array, gap: Int64Array
) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Return, for each gap, whether units of two run groups can have this distance; sides are their axes and bases."""
    low, high = np.array([_reach(*side) for side in sides], dtype=np.int64).T
    near: np.ndarray[tuple[int], np.dtype[np.bool_]]
    near = (gap >= low[after] - high[before]) & (gap <= high[after] - low[before])
    return near
