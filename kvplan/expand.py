"""Compiled loops of the planner: ids to unit addresses, units to descriptors. Only this file of the planner imports
numba.

Every loop takes C-contiguous writable int64 arrays, so that each is compiled once; callers in ``blockmap`` and
``lower`` see to that.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numba import njit

PLACED: Final = 0
SRC_OUTSIDE: Final = 1
DST_OUTSIDE: Final = 2
TWICE: Final = 3

_compiled = njit(cache=True, nogil=True, boundscheck=False)


@_compiled
def _outside(ids, num_blocks):
    """Position of the first id that is no block, or -1."""
    low, high = np.int64(0), np.int64(-1)
    for block in ids:
        low = min(low, block)
        high = max(high, block)
    if low >= 0 and high < num_blocks:
        return -1
    for at in range(ids.size):
        if ids[at] < 0 or ids[at] >= num_blocks:
            return at
    return -1


@_compiled
def _twice(ids, skip, units, count, seen):
    """First unit (block * units + unit) that is named twice, or -1. ``seen`` comes and goes all clear."""
    rising = True
    for at in range(1, ids.size):
        if ids[at] <= ids[at - 1]:
            rising = False
            break
    if rising:
        return -1
    found = np.int64(-1)
    done = np.int64(0)
    at, unit = 0, skip
    while done < count:
        number = ids[at] * units + unit
        word, bit = number >> 6, np.uint64(1) << np.uint64(number & 63)
        if seen[word] & bit:
            found = number
            break
        seen[word] |= bit
        done += 1
        unit += 1
        if unit == units:
            at, unit = at + 1, 0
    at, unit = 0, skip
    for _ in range(done):
        seen[(ids[at] * units + unit) >> 6] = np.uint64(0)
        unit += 1
        if unit == units:
            at, unit = at + 1, 0
    return found


@_compiled
def _place_side(ids, skip, axes, tables, out, side):
    units = axes.shape[1] - 3
    count = out.shape[2]
    for group in range(axes.shape[0]):
        base, stride, row = axes[group, 0], axes[group, 1], axes[group, 2]
        target = out[group, side]
        if units == 1 and row < 0:
            base += axes[group, 3]
            for at in range(count):
                target[at] = base + ids[at] * stride
            continue
        at, unit = 0, skip
        for k in range(count):
            block = tables[row, ids[at]] if row >= 0 else ids[at] * stride
            target[k] = base + block + axes[group, 3 + unit]
            unit += 1
            if unit == units:
                at, unit = at + 1, 0


@_compiled
def place_units(
    src_ids, dst_ids, src_skip, dst_skip, src_axes, dst_axes, src_tables, dst_tables, src_blocks, dst_blocks, seen, out
):
    """Fill ``out`` (groups, 2, units) with unit addresses; see :func:`kvplan.blockmap.place`.

    Returns:
        (PLACED, 0), or what is wrong and where: (SRC_OUTSIDE or DST_OUTSIDE, position), (TWICE, unit number).
    """
    at = _outside(src_ids, src_blocks)
    if at >= 0:
        return SRC_OUTSIDE, at
    at = _outside(dst_ids, dst_blocks)
    if at >= 0:
        return DST_OUTSIDE, at
    at = _twice(dst_ids, dst_skip, dst_axes.shape[1] - 3, out.shape[2], seen)
    if at >= 0:
        return TWICE, at
    _place_side(src_ids, src_skip, src_axes, src_tables, out, 0)
    _place_side(dst_ids, dst_skip, dst_axes, dst_tables, out, 1)
    return PLACED, 0


@_compiled
def count_chains(units, nbytes):
    """Copies left of one run of ``nbytes`` over ``units`` (2, n), after merging each with the one before it."""
    chains = units.shape[1]
    for k in range(1, units.shape[1]):
        if units[0, k] - units[0, k - 1] == nbytes and units[1, k] - units[1, k - 1] == nbytes:
            chains -= 1
    return chains


@_compiled
def fill(units, run_src, run_dst, run_size, at, src, dst, size):
    """Write every run of every unit, run by run, from position ``at`` on; returns the position after the last."""
    count = units.shape[1]
    for run in range(run_src.size):
        a, b, nbytes = run_src[run], run_dst[run], run_size[run]
        for k in range(count):
            src[at + k] = units[0, k] + a
            dst[at + k] = units[1, k] + b
            size[at + k] = nbytes
        at += count
    return at


@_compiled
def fill_chains(units, run_src, run_dst, run_size, at, src, dst, size):
    """Like :func:`fill`, merging each copy with the one before it where they are adjacent on both sides."""
    count = units.shape[1]
    for run in range(run_src.size):
        nbytes = run_size[run]
        first = 0
        while first < count:
            last = first + 1
            while (
                last < count
                and units[0, last] - units[0, last - 1] == nbytes
                and units[1, last] - units[1, last - 1] == nbytes
            ):
                last += 1
            src[at] = units[0, first] + run_src[run]
            dst[at] = units[1, first] + run_dst[run]
            size[at] = nbytes * (last - first)
            at += 1
            first = last
    return at


@_compiled
def stitch(bounds, src, dst, size):
    """Merge descriptors that meet at one of the destination addresses ``bounds`` (ascending); in place.

    Returns:
        How many descriptors are left, at the front of the arrays.
    """
    before = np.full(bounds.size, -1, dtype=np.int64)  # the descriptor that ends at each bound
    after = np.full(bounds.size, -1, dtype=np.int64)  # the descriptor that begins there
    for k in range(dst.size):
        at = np.searchsorted(bounds, dst[k])
        if at < bounds.size and bounds[at] == dst[k]:
            after[at] = k
        at = np.searchsorted(bounds, dst[k] + size[k])
        if at < bounds.size and bounds[at] == dst[k] + size[k]:
            before[at] = k
    for at in range(bounds.size - 1, -1, -1):  # from the highest, so that a chain grows at its end first
        if before[at] >= 0 and after[at] >= 0:
            size[before[at]] += size[after[at]]
            size[after[at]] = 0
    left = 0
    for k in range(size.size):
        if size[k]:
            src[left], dst[left], size[left] = src[k], dst[k], size[k]
            left += 1
    return left


@_compiled
def _next_cut(start, done, seams):
    """Bytes from ``start`` to the first seam beyond ``start + done``, or a very large number."""
    at = np.searchsorted(seams, start + done, side="right")
    return seams[at] - start if at < seams.size else np.int64(2**62)


@_compiled
def split(src_seams, dst_seams, cap, src, dst, size, out_src, out_dst, out_size, write):
    """Cut descriptors at seams and at ``cap`` bytes. Without ``write``, only count.

    Returns:
        How many descriptors there are.
    """
    count = 0
    for k in range(size.size):
        done = np.int64(0)
        while done < size[k]:
            stop = min(size[k], done + cap)
            stop = min(stop, _next_cut(src[k], done, src_seams))
            stop = min(stop, _next_cut(dst[k], done, dst_seams))
            if write:
                out_src[count] = src[k] + done
                out_dst[count] = dst[k] + done
                out_size[count] = stop - done
            count += 1
            done = stop
    return count
