"""The planner's loops in plain numpy: for small plans of processes that end soon, and for very irregular programs.

To lower a plan, this module sorts all descriptors. So it accepts any input, but it needs several times the memory of
the descriptors. Its other functions have the names and arguments of the compiled loops, so that
:func:`kvplan.plan.loops.loops_for` can return either module.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Any, Final, NamedTuple

import numpy as np

from kvplan.layout.strides import Int64Array
from kvplan.program.program import merge_adjacent

# Results of ``place_units``, compiled or not.
PLACED: Final = 0
SRC_OUTSIDE: Final = 1
DST_OUTSIDE: Final = 2
TWICE: Final = 3


class Descriptors(NamedTuple):
    """A list of contiguous copies: three C-contiguous int64 arrays of equal length.

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
    """Lower units to the fewest descriptors.

    Args:
        parts: for each part, source offsets, destination offsets and bytes of its runs, and its units (2, n).
        src_seams, dst_seams: addresses, ascending, that no descriptor may cross.
        max_nbytes: maximum bytes per descriptor.

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
    """Cut descriptors at seams, then into pieces of at most ``max_nbytes`` bytes.

    >>> none = np.array([], dtype=np.int64)
    >>> cut(Descriptors(np.array([0]), np.array([100]), np.array([30])), np.array([10]), none, 16)
    Descriptors(src=array([ 0, 10, 26]), dst=array([100, 110, 126]), size=array([10, 16,  4]))
    """
    rows: list[tuple[int, int, int]] = []
    for src, dst, size in zip(*(column.tolist() for column in made), strict=True):
        edges = {0, size}
        for start, seams in ((src, src_seams), (dst, dst_seams)):
            # These may include a seam at the end of a descriptor, which is an edge already.
            first, last = np.searchsorted(seams, (start, start + size))
            edges.update((seams[first:last] - start).tolist())
        step = max_nbytes or size
        for low, high in pairwise(sorted(edges)):
            rows.extend((src + at, dst + at, min(step, high - at)) for at in range(low, high, step))
    table = np.array(rows, dtype=np.int64).reshape(-1, 3)
    return Descriptors(*(np.ascontiguousarray(table[:, k]) for k in range(3)))


def place_units(
    src_ids: Int64Array, dst_ids: Int64Array, src_skip: int, dst_skip: int, src_axes: Int64Array, dst_axes: Int64Array,
    src_tables: Int64Array, dst_tables: Int64Array, src_blocks: int, dst_blocks: int, seen: Any, out: Int64Array,
) -> tuple[int, int]:  # fmt: skip
    """Fill ``out`` (groups, 2, units) with unit addresses; see :func:`kvplan.plan.placing_numba.place_units`.

    ``seen`` is not needed here.
    """
    del seen
    count = out.shape[2]
    src_ids, dst_ids = src_ids.copy(), dst_ids.copy()
    out[0, 0, : src_ids.size], out[0, 1, : dst_ids.size] = src_ids, dst_ids  # the error message reads the ids there
    for ids, num_blocks, kind in ((src_ids, src_blocks, SRC_OUTSIDE), (dst_ids, dst_blocks, DST_OUTSIDE)):
        outside = np.flatnonzero((ids < 0) | (ids >= num_blocks))
        if outside.size:
            return kind, int(outside[0])
    units = dst_axes.shape[1] - 3
    numbers = (dst_ids[:, None] * units + np.arange(units)).ravel()[dst_skip : dst_skip + count]
    again = np.ones(count, dtype=np.bool_)
    again[np.unique(numbers, return_index=True)[1]] = False
    if again.any():
        return TWICE, int(numbers[np.argmax(again)])
    place_side(src_ids, src_skip, src_axes, src_tables, out[:, 0])
    place_side(dst_ids, dst_skip, dst_axes, dst_tables, out[:, 1])
    return PLACED, 0


def place_side(ids: Int64Array, skip: int, axes: Int64Array, tables: Int64Array, out: Int64Array) -> None:
    """Write the addresses of one side's units to ``out`` (groups, units); see :class:`kvplan.plan.placement.Side`."""
    for group, (base, stride, row) in enumerate(axes[:, :3].tolist()):
        blocks = tables[row, ids] if row >= 0 else ids * stride
        out[group] = (base + blocks[:, None] + axes[group, 3:]).ravel()[skip : skip + out.shape[1]]


def chain(units: Int64Array, nbytes: int, slots: Any, chains: Int64Array) -> int:
    """Merge units that are adjacent on both sides; see :func:`kvplan.plan.loops_numba.chain`.

    ``slots`` is not needed here.
    """
    del slots
    made = merge_adjacent(units[0], units[1], np.full(units.shape[1], nbytes, dtype=np.int64))
    chains[:, : made[0].size] = made
    return made[0].size
