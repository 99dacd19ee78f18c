"""The rows that a transfer chooses of two lists: checked, and with their addresses, in one pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from kvplan.engines.nixl.descriptor_rows import Rows
from kvplan.layout.strides import Int64Array
from kvplan.plan import loops
from kvplan.plan.plan import Plan
from kvplan.plan.row_plans import RowProgram

MOST_ROWS = (1 << 32) - 1  # of a list: kept indices have 32 bits


class ChosenRows(NamedTuple):
    """Rows of two lists, with one size.

    Attributes:
        units: (2, n) int64: source and destination address of each row.
        kept: (2, n) uint32: the indices of this process's rows, and of the peer's.
    """

    units: Int64Array
    kept: np.ndarray[Any, Any]

    def plan(self, program: RowProgram, size: int, alignment: int) -> Plan:
        """Plan the copies of the rows."""
        return program.of_units(self.units, size, alignment)

    def pass_on(self, by_nixl: Callable[..., Any]) -> Callable[[bytes], Any]:
        """Return a function that makes the transfer by NIXL, of a notification."""
        kept = self.kept
        return lambda note: by_nixl(note, *kept.astype(np.int64))


def chosen_rows(operation: str, here: Rows, there: Rows, chosen: tuple[Any, Any]) -> ChosenRows | None:
    """Check indices, and return the rows; None if an index is wrong, or if there is no compiled loop for such lists.

    Args:
        operation: ``"READ"`` or ``"WRITE"``.
        here, there: the lists of this process and of the peer, at their addresses in this process.
        chosen: the indices in each list; the caller may change them afterwards.
    """
    mine, its = here.expanded, there.expanded
    if loops.loaded is None or mine is None or its is None or max(mine.size, its.size) > MOST_ROWS:
        return None
    from kvplan.engines.nixl import row_loops  # imports numba

    at, to = (np.asarray(one) for one in chosen)
    if any(one.ndim != 1 or not one.size or one.dtype.kind not in "iu" for one in (at, to)) or at.size != to.size:
        return None
    at, to = plain(at), plain(to)
    units = np.empty((2, at.size), dtype=np.int64)
    kept = np.empty((2, at.size), dtype=np.uint32)
    src, dst = units
    sides = (dst, src) if operation == "READ" else (src, dst)
    for rows, known, indices_of, written, own in zip((here, there), (mine, its), (at, to), sides, kept, strict=True):
        if not row_loops.choose(known, rows.up_to, rows.address, rows.stride, indices_of, written, own):
            return None
    return ChosenRows(units, kept)


def plain(indices: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return indices as the loop takes them: the same array if it can, otherwise a copy.

    >>> plain(np.array([1, 2], np.int32)).dtype
    dtype('int64')
    """
    if indices.dtype == np.int64 and indices.flags.carray:
        return indices
    return np.array(indices, dtype=np.int64, order="C")


def indices(given: Any, count: int) -> Int64Array | None:
    """Return indices as an int64 array; None if there are none, or one is out of range, which NIXL then refuses.

    >>> indices([0, 2], 3), indices([3], 3), indices([], 3)
    (array([0, 2]), None, None)
    """
    array = np.asarray(given)
    if array.ndim != 1 or not array.size or array.dtype.kind not in "iu":
        return None
    made = np.array(array, dtype=np.int64)  # a copy: the caller may change its own
    if int(made.view(np.uint64).max()) >= count:  # a negative index is a large one
        return None
    return made
