"""The compiled loop that makes a transfer: it checks the indices of rows, and writes the rows' addresses."""

from __future__ import annotations

import numpy as np
from numba import types

from kvplan.plan.jit import compiled as _compiled


@_compiled
def choose(known, ends, address, stride, chosen, written, kept):
    """Write the addresses of chosen descriptors of a list. The caller may change its indices: each is read once.

    Engines choose many descriptors of a row one after another. Their addresses are computed, which takes less than to
    read them. If the rows change too often, the addresses are read.

    Args:
        known: (n,) int64: the address of every descriptor.
        ends, address, stride: (r,) int64: for each row, the number of descriptors up to its end, the address of its
            first descriptor, and the bytes from one to the next.
        chosen: (m,) int64: indices of descriptors.
        written: (m,) int64, written: addresses of the chosen descriptors.
        kept: (m,) uint32, written: the indices.

    Returns:
        Whether all indices are in range. If not, no address is written.
    """
    largest = np.uint64(0)
    for k in range(chosen.size):
        one = np.uint64(chosen[k])  # a negative index is a large one
        largest = max(largest, one)
        kept[k] = np.uint32(one)
    if largest >= np.uint64(known.size):
        return False
    at, changes = 0, 0
    while at < chosen.size:
        changes += 1
        if changes > 64 + at // 8:
            for k in range(at, chosen.size):  # unsigned indices, for which numba makes no code that counts from the end
                written[k] = known[kept[k]]
            return True
        low, high, index = 0, ends.size, np.int64(kept[at])
        while low < high:
            middle = (low + high) // 2
            if ends[middle] <= index:
                low = middle + 1
            else:
                high = middle
        before = ends[low - 1] if low else 0
        first, count, base, step = np.uint32(before), np.uint32(ends[low] - before), address[low], stride[low]
        while at < chosen.size:
            inside = np.uint32(kept[at] - first)  # an index before the row is a large one
            if inside >= count:
                break
            written[at] = base + np.int64(inside) * step
            at += 1
    return True


def load() -> None:
    """Compile the loop for the types of its arguments, or load it from numba's cache."""
    row = types.int64[::1]
    choose.compile((row, row, row, row, row, row, types.uint32[::1]))
