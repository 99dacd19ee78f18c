"""Compiled loops that place units: block ids in, unit addresses out.

Every loop takes C-contiguous writable int64 arrays, so that numba compiles each once; :mod:`kvplan.plan.placement`
hands in no others. :mod:`kvplan.plan.loops_numpy` has the same in numpy.
"""

from __future__ import annotations

import numpy as np

from kvplan.plan.jit import compiled as _compiled
from kvplan.plan.loops_numpy import DST_OUTSIDE, PLACED, SRC_OUTSIDE, TWICE


@_compiled
def _copy_outside(given, num_blocks, row):
    """Copy ids to the front of a row; return the position of the first id outside the blocks, or -1.

    No lock is held here, and another thread may change its array meanwhile. So each id is read once, and the copy is
    checked and used.
    """
    ids = row[: given.size]
    for at in range(given.size):
        ids[at] = given[at]
    last, signs = num_blocks - 1, np.int64(0)
    for at in range(ids.size):  # by position: numba does not vectorise a loop over the ids themselves
        signs |= ids[at] | (last - ids[at])  # negative where the id is negative or past the last block
    if signs >= 0:
        return -1
    for at in range(ids.size):
        if ids[at] < 0 or ids[at] > last:
            return at
    return -1


@_compiled
def _twice_blocks(ids, seen):
    """Find a block that is named twice, as :func:`_twice` does, where blocks hold one unit."""
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
    """Return the first unit (block * units + unit) named twice, or -1; ``seen`` is all zeros before and after."""
    rising = True
    for at in range(1, ids.size):
        if ids[at] <= ids[at - 1]:
            rising = False
            break
    if rising:
        return -1
    if units == 1:  # true for most pairs, and faster: no units to count inside a block
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
    """Write the addresses of one side's units. Its ids lie at the front of the first group's row, written last."""
    units = axes.shape[1] - 3
    count = out.shape[2]
    ids = out[0, side]
    if units > 1 or axes[0, 2] >= 0:
        ids = ids[: (skip + count - 1) // units + 1].copy()  # the units of a block would overwrite the ids behind it
    for group in range(axes.shape[0] - 1, -1, -1):
        base, stride, row = axes[group, 0], axes[group, 1], axes[group, 2]
        target = out[group, side]
        if units == 1 and row < 0:
            start = base + axes[group, 3]
            if group == 0:  # reads and writes by one name, so that numba vectorises a loop that overwrites its input
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

    Each given id is read once; copies in ``out[0]`` are checked and used. No list is longer than the units that it
    covers. The copy of an id outside the blocks stays there for the error message.

    Returns:
        (PLACED, 0), or the error and its place: (SRC_OUTSIDE or DST_OUTSIDE, position), or (TWICE, unit number).
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
