"""Compiled loops that compute unit addresses from block ids.

:mod:`kvplan.plan.placement` passes only C-contiguous writable int64 arrays, so that numba compiles each loop once.
:mod:`kvplan.plan.loops_numpy` has the same loops in numpy.
"""

from __future__ import annotations

import numpy as np

from kvplan.plan.jit import compiled as _compiled
from kvplan.plan.loops_numpy import DST_OUTSIDE, PLACED, SRC_OUTSIDE, TWICE


@_compiled
def _copy_outside(given, num_blocks, row):
    """Copy ids to the front of a row, and return the position of the first id that is out of range, or -1.

    No lock is held here, so another thread may change ``given`` meanwhile. So each id is read once, and the copy of it
    is checked and used.
    """
    ids = row[: given.size]
    for at in range(given.size):
        ids[at] = given[at]
    last, signs = num_blocks - 1, np.int64(0)
    for at in range(ids.size):  # by position: numba does not vectorise a loop over the ids themselves
        signs |= ids[at] | (last - ids[at])  # negative if the id is negative or larger than the last block id
    if signs >= 0:
        return -1
    for at in range(ids.size):
        if ids[at] < 0 or ids[at] > last:
            return at
    return -1


@_compiled
def _twice_blocks(ids, seen):
    """Return the first block that is named twice, or -1; the same as :func:`_twice` for blocks of one unit."""
    found = np.int64(-1)
    done = ids.size
    for at in range(ids.size):
        number = np.uint64(ids[at])
        bit = np.uint64(1) << (number & np.uint64(63))
        word = number >> np.uint64(6)
        if seen[word] & bit:
            found, done = ids[at], at
            break
        seen[word] |= bit
    for at in range(done):
        seen[np.uint64(ids[at]) >> np.uint64(6)] = np.uint64(0)
    return found


@_compiled
def _twice(ids, skip, units, count, seen):
    """Return the first unit (block * units + unit) that is named twice, or -1. ``seen`` is zero before and after."""
    rising = True
    for at in range(1, ids.size):
        if ids[at] <= ids[at - 1]:
            rising = False
            break
    if rising:
        return -1
    if units == 1:  # true for most pairs, and faster
        return _twice_blocks(ids, seen)
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
def _place_side(skip, axes, tables, out, side):
    """Write the addresses of one side's units. The first group's row begins with the ids, so it comes last."""
    units = axes.shape[1] - 3
    count = out.shape[2]
    ids = out[0, side]
    if units > 1 or axes[0, 2] >= 0:
        ids = ids[: (skip + count - 1) // units + 1].copy()  # the units of a block would overwrite the ids after it
    for group in range(axes.shape[0] - 1, -1, -1):
        base, stride, row = axes[group, 0], axes[group, 1], axes[group, 2]
        target = out[group, side]
        if units == 1 and row < 0:
            start = base + axes[group, 3]
            if group == 0:  # one name for reads and writes: numba then vectorises a loop that overwrites its input
                for at in range(count):
                    target[at] = start + target[at] * stride
            else:
                for at in range(count):
                    target[at] = start + ids[at] * stride
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
    """Fill ``out`` (groups, 2, units) with unit addresses; see :func:`kvplan.plan.placement.place`.

    Each id is read once, and its copy in ``out[0]`` is checked and used. A list has at most one id per unit that it
    covers. If an id is out of range, its copy stays in ``out[0]`` for the error message.

    Returns:
        (PLACED, 0); or the error and its position: (SRC_OUTSIDE or DST_OUTSIDE, position) or (TWICE, unit number).
    """
    at = _copy_outside(src_ids, src_blocks, out[0, 0])
    if at >= 0:
        return SRC_OUTSIDE, at
    at = _copy_outside(dst_ids, dst_blocks, out[0, 1])
    if at >= 0:
        return DST_OUTSIDE, at
    at = _twice(out[0, 1][: dst_ids.size], dst_skip, dst_axes.shape[1] - 3, out.shape[2], seen)
    if at >= 0:
        return TWICE, at
    _place_side(src_skip, src_axes, src_tables, out, 0)
    _place_side(dst_skip, dst_axes, dst_tables, out, 1)
    return PLACED, 0
