"""The compiled loop of the kernel path: it writes a launch header and units into a pinned slot."""

from __future__ import annotations

import numpy as np

from kvplan.plan.jit import compiled as _compiled


@_compiled
def write_units(words, base, at, first, units, table):
    """Write the header of a launch, and its units.

    Args:
        words: memory of the slot, int64.
        base: address at which the kernel reads the first byte of the slot.
        at: index of the header's first word in the slot.
        first: index of the units' first word in the slot.
        units: (2, n) int64: source and destination addresses.
        table: header words of the run table; the number of units and their addresses replace three of them.
    """
    count = units.shape[1]
    for k in range(table.size):
        words[at + k] = table[k]
    words[at], words[at + 3], words[at + 4] = count, base + 8 * first, base + 8 * (first + count)
    for side in range(2):
        for k in range(count):
            words[first + side * count + k] = units[side, k]


def load() -> None:
    """Compile the loop for the types of its arguments, or load it from numba's cache, by one call on small arrays."""
    write_units(np.zeros(11, np.int64), 0, 0, 9, np.zeros((2, 1), np.int64), np.zeros(9, np.int64))
