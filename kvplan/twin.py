"""Flat lowering in plain numpy: the slow twin of the compiled loops, and their fallback for irregular programs.

It sorts where the loops reason, so it holds several times the descriptors in memory and takes any input.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from kvplan.program import Int64Array, merge_adjacent


class Descriptors(NamedTuple):
    """Contiguous copies: three int64 arrays, C-contiguous, of equal length.

    Attributes:
        src: source addresses.
        dst: destination addresses.
        size: bytes.
    """

    src: Int64Array
    dst: Int64Array
    size: Int64Array


def flat(
    parts: Iterable[tuple[Int64Array, Int64Array, Int64Array, Int64Array]],
    src_seams: Int64Array,
    dst_seams: Int64Array,
    max_nbytes: int | None,
) -> Descriptors:
    """Fewest contiguous copies of some units.

    Args:
        parts: run source offsets, run destination offsets, run bytes, and units (2, n).
        src_seams, dst_seams: ascending addresses that no copy may cross.
        max_nbytes: bytes that no copy may exceed.

    >>> runs = [np.array(column) for column in ([0, 8], [100, 164], [8, 8])]
    >>> none = np.array([], dtype=np.int64)
    >>> flat([(*runs, np.array([[0, 16], [0, 8]]))], none, none, None)
    Descriptors(src=array([16,  0, 24,  8]), dst=array([108, 100, 172, 164]), size=array([8, 8, 8, 8]))
    """
    columns: list[tuple[Int64Array, Int64Array, Int64Array]] = []
    for run_src, run_dst, run_size, units in parts:
        src = (units[0] + run_src[:, None]).ravel()
        dst = (units[1] + run_dst[:, None]).ravel()
        columns.append((src, dst, np.repeat(run_size, units.shape[1])))
    merged = Descriptors(*merge_adjacent(*(np.concatenate(column) for column in zip(*columns, strict=True))))
    if not src_seams.size and not dst_seams.size and max_nbytes is None:
        return merged
    return cut(merged, src_seams, dst_seams, max_nbytes)


def cut(made: Descriptors, src_seams: Int64Array, dst_seams: Int64Array, max_nbytes: int | None) -> Descriptors:
    """Cut copies at seams, then into pieces of at most ``max_nbytes``.

    >>> none = np.array([], dtype=np.int64)
    >>> cut(Descriptors(np.array([0]), np.array([100]), np.array([30])), np.array([10]), none, 16)
    Descriptors(src=array([ 0, 10, 26]), dst=array([100, 110, 126]), size=array([10, 16,  4]))
    """
    rows: list[tuple[int, int, int]] = []
    for src, dst, size in zip(*(column.tolist() for column in made), strict=True):
        edges = {0, size}
        for start, seams in ((src, src_seams), (dst, dst_seams)):
            inside = seams[np.searchsorted(seams, start, "right") : np.searchsorted(seams, start + size, "left")]
            edges.update((inside - start).tolist())
        ordered = sorted(edges)
        for low, high in pairwise(ordered):
            step = max_nbytes or high - low
            rows.extend((src + at, dst + at, min(step, high - at)) for at in range(low, high, step))
    table = np.array(rows, dtype=np.int64).reshape(-1, 3)
    return Descriptors(*(np.ascontiguousarray(table[:, k]) for k in range(3)))
