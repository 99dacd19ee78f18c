"""The compiled loop that makes a transfer: it checks the indices of rows, and writes the rows' addresses."""

from __future__ import annotations

import numpy as np
from numba import types

from kvplan.plan.jit import compiled as _compiled


@_compiled
def choose(known, chosen, written, kept):
    """Write the addresses of chosen rows of a list. The caller may change its indices meanwhile: each is read once.

    Args:
        known: (n,) int64: the address of every row.
        chosen: (m,) int64: indices of rows.
        written: (m,) int64, written: addresses of the chosen rows.
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
    for k in range(chosen.size):  # unsigned indices, for which numba makes no code that counts from the end
        written[k] = known[kept[k]]
    return True


def load() -> None:
    """Compile the loop for the types of its arguments, or load it from numba's cache."""
    row = types.int64[::1]
    choose.compile((row, row, row, types.uint32[::1]))
