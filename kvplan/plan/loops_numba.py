"""Compiled loops that turn unit addresses into descriptors.

Callers pass only C-contiguous writable int64 arrays, so that numba compiles each loop once.
:mod:`kvplan.plan.loops_numpy` has the same loops in numpy.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from kvplan.plan.jit import compiled as _compiled
from kvplan.plan.placing_numba import place_units

TILE: Final = 1024  # units; their addresses stay in the L1 cache while every run is written
SPREAD: Final = np.uint64(0x9E3779B97F4A7C15)  # 2^64 over the golden ratio


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
def _reach(column):
    low = high = column[0]
    for address in column:
        low = min(low, address)
        high = max(high, address)
    return low, high


@_compiled
def can_meet(before, after, src_gap, dst_gap):
    """Return whether the address ranges of two sets of units (2, n) overlap after ``before`` is moved by the gaps."""
    for side, gap in ((0, src_gap), (1, dst_gap)):
        low, high = _reach(before[side])
        after_low, after_high = _reach(after[side])
        if high + gap < after_low or low + gap > after_high:
            return False
    return True


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


@_compiled
def stitch(bounds, src, dst, size):
    """Merge, in place, every two descriptors of which one ends and the other begins at an address in ``bounds``.

    Args:
        bounds: destination addresses, ascending. The caller knows that the sources are adjacent there, too.
        src, dst, size: (n,) each: the descriptors, overwritten.

    Returns:
        The number of descriptors that are left. They are the first ones of the arrays.
    """
    before = np.full(bounds.size, -1, dtype=np.int64)  # the descriptor that ends at each bound
    after = np.full(bounds.size, -1, dtype=np.int64)  # the descriptor that begins at each bound
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
    """Return the bytes from ``start`` to the first seam after ``start + done``, or a very large number."""
    at = np.searchsorted(seams, start + done, side="right")
    return seams[at] - start if at < seams.size else np.int64(2**62)


@_compiled
def split(src_seams, dst_seams, cap, src, dst, size, out_src, out_dst, out_size, write):
    """Cut descriptors at seams, and into pieces of at most ``cap`` bytes. If not ``write``, only count the pieces.

    Returns:
        The number of pieces.
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


def load() -> None:
    """Compile every loop for the types of a plan's arrays, or load it from numba's cache. Nothing is planned."""
    none, bits = np.empty(0, np.int64), np.zeros(1, np.uint64)
    units, runs, out = np.zeros((2, 1), np.int64), np.zeros((3, 1), np.int64), np.empty((3, 1), np.int64)
    axes = np.zeros((1, 4), np.int64)
    place_units(none, none, 0, 0, axes, axes, units, units, 1, 1, bits, np.empty((1, 2, 0), np.int64))
    chain(units, 1, np.empty(2, np.int32), out)
    can_meet(units, units, 0, 0)
    fill(units, runs, 0, out)
    fill_chains(runs, 1, runs, 0, out)
    stitch(none, none, none, none)
    for write in (False, True):
        split(none, none, 1, none, none, none, none, none, none, write=write)
