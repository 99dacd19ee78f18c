"""Merge and fold the copies of one half of a unit: between the unit and its bytes in a chunk."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kvplan.layout.strides import Int64Array, Loop
from kvplan.program.program import Run


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
