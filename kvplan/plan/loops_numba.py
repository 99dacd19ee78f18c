"""Compiled loops that compute unit addresses from block ids, and turn them into descriptors.

Callers pass only C-contiguous writable int64 arrays, so that numba compiles each loop once.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from kvplan.plan.jit import compiled as _compiled

PLACED, SRC_OUTSIDE, DST_OUTSIDE, TWICE = range(4)  # as in loops.py
TILE: Final = 1024  # units; their addresses stay in the L1 cache while every run is written
SPREAD: Final = np.uint64(0x9E3779B97F4A7C15)  # 2^64 over the golden ratio


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


@_compiled
def _find(dst, units, slots, shift):
    """Return the position of the unit with this destination, or -1. The product with SPREAD may wrap around."""
    mask = np.uint64(slots.size - 1)
    slot = (np.uint64(dst) * SPREAD) >> shift
    while slots[slot] >= 0:
        if units[1, slots[slot]] == dst:
            return np.int64(slots[slot])
        slot = (slot + np.uint64(1)) & mask
    return np.int64(-1)


@_compiled
def chain(units, nbytes, slots, chains):
    """Merge units into chains if their runs of ``nbytes`` are adjacent on both sides.

    No two units have the same destination, so a hash table of destinations finds every neighbour without sorting.

    Args:
        units: (2, n) addresses.
        nbytes: bytes of the run.
        slots: int32, overwritten; their number is a power of two, at least 2 n.
        chains: (3, n), written: source and destination of the first unit of each chain, and bytes of the chain.

    Returns:
        The number of chains.
    """
    bits = 0
    while (1 << bits) < slots.size:
        bits += 1
    shift, mask = np.uint64(64 - bits), np.uint64(slots.size - 1)
    slots[:] = -1
    for k in range(units.shape[1]):
        slot = (np.uint64(units[1, k]) * SPREAD) >> shift
        while slots[slot] >= 0:
            slot = (slot + np.uint64(1)) & mask
        slots[slot] = k
    count = 0
    for k in range(units.shape[1]):
        src, dst = units[0, k], units[1, k]
        before = _find(dst - nbytes, units, slots, shift)
        if before >= 0 and units[0, before] == src - nbytes:
            continue
        done = nbytes
        while True:
            after = _find(dst + done, units, slots, shift)
            if after < 0 or units[0, after] != src + done:
                break
            done += nbytes
        chains[0, count], chains[1, count], chains[2, count] = src, dst, done
        count += 1
    return count


@_compiled
def fill(units, runs, at, out):
    """Write the descriptors of every run of every unit, run by run.

    Args:
        units: (2, n) addresses.
        runs: (3, runs): source offset, destination offset, bytes.
        at: position of the first row to write.
        out: (3, total), written: src, dst, size.

    Returns:
        The position after the last row.
    """
    count = units.shape[1]
    for first in range(0, count, TILE):
        last = min(first + TILE, count)
        unit_src, unit_dst = units[0, first:last], units[1, first:last]
        for run in range(runs.shape[1]):
            a, b, nbytes = runs[0, run], runs[1, run], runs[2, run]
            # The slices begin at 0. With an index that could be negative, numba does not vectorise: 3 times slower.
            low, high = at + run * count + first, at + run * count + last
            src, dst, size = out[0, low:high], out[1, low:high], out[2, low:high]
            for k in range(last - first):
                src[k] = unit_src[k] + a
                dst[k] = unit_dst[k] + b
                size[k] = nbytes
    return at + runs.shape[1] * count


@_compiled
def fill_chains(chains, count, runs, at, out):
    """Write the descriptors of the first ``count`` chains (3, n) of runs of one size; see :func:`fill`."""
    unit_src, unit_dst, nbytes = chains[0], chains[1], chains[2]
    for run in range(runs.shape[1]):
        a, b = runs[0, run], runs[1, run]
        src, dst, size = out[0, at : at + count], out[1, at : at + count], out[2, at : at + count]
        for k in range(count):
            src[k] = unit_src[k] + a
            dst[k] = unit_dst[k] + b
            size[k] = nbytes[k]
        at += count
    return at


def load() -> None:
    """Compile every loop for the types of a plan's arrays, or load it from numba's cache. Nothing is planned."""
    none, bits = np.empty(0, np.int64), np.zeros(1, np.uint64)
    units, runs, out = np.zeros((2, 1), np.int64), np.zeros((3, 1), np.int64), np.empty((3, 1), np.int64)
    axes = np.zeros((1, 4), np.int64)
    place_units(none, none, 0, 0, axes, axes, units, units, 1, 1, bits, np.empty((1, 2, 0), np.int64))
    chain(units, 1, np.empty(2, np.int32), out)
    fill(units, runs, 0, out)
    fill_chains(runs, 1, runs, 0, out)
