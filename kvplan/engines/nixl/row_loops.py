"""The compiled loop that makes a transfer: it checks the indices of rows, and writes the rows' addresses."""

from __future__ import annotations

import numpy as np
from numba import types

from kvplan.plan.jit import compiled as _compiled


@_compiled
def choose(mine, its, at, to, here, there, kept):
    """Write the addresses of chosen rows of two lists. The caller may change its indices meanwhile: each is read once.

    Args:
        mine, its: (n,) int64: the address of every row of each list.
        at, to: (m,) int64: indices of rows of each list.
        here, there: (m,) int64, written: addresses of the chosen rows.
        kept: (2, m) int32, written: the indices.

    Returns:
        Whether all indices are in range. If not, the rest is not written.
    """
    for k in range(at.size):
        one, other = at[k], to[k]
        if one < 0 or one >= mine.size or other < 0 or other >= its.size:
            return False
        here[k], there[k] = mine[one], its[other]
        kept[0, k], kept[1, k] = one, other
    return True


def load() -> None:
    """Compile the loop for the types of its arguments, or load it from numba's cache."""
    row, table = types.int64[::1], types.int32[:, ::1]
    choose.compile((row, row, row, row, row, row, table))


def plain(indices):
    """Return indices as the loop takes them: the same array if it can, otherwise a copy.

    >>> plain(np.array([1, 2], np.int32)).dtype
    dtype('int64')
    """
    if indices.dtype == np.int64 and indices.flags.carray:
        return indices
    return np.array(indices, dtype=np.int64, order="C")
