"""Copy loops without numba, for short processes, in which the start of numba costs more time than it saves.

They make one C call per copy. They have the names, arguments and results of the loops in ``memcpy``.
"""

from __future__ import annotations

import ctypes

from kvplan.layout.strides import Int64Array


def copy_units(
    units: Int64Array, run_src: Int64Array, run_dst: Int64Array, run_size: Int64Array, first: int, last: int,
    streaming: bool,  # an argument of the compiled loop
) -> None:  # fmt: skip
    """Make some copies of a plan part. They are numbered unit by unit, and run by run within a unit.

    Args:
        units: (2, n) int64, source and destination address of each unit.
        run_src, run_dst, run_size: offsets and bytes of each copy within a unit.
        first, last: number of the first copy to make, and of the first copy after the last.
        streaming: not used; an argument of the compiled loop.
    """
    runs = run_src.size
    begin, end = first // runs, -(-last // runs)
    some = slice(first - begin * runs, last - begin * runs)
    src = (units[0, begin:end, None] + run_src).ravel()[some]
    dst = (units[1, begin:end, None] + run_dst).ravel()[some]
    size = (0 * units[0, begin:end, None] + run_size).ravel()[some]
    copy_flat(src, dst, size, 0, last - first, streaming)


def copy_flat(
    src: Int64Array, dst: Int64Array, size: Int64Array, first: int, last: int,
    streaming: bool,
) -> None:  # fmt: skip
    """Copy the descriptors from position ``first`` up to, but not including, ``last``."""
    del streaming
    move = ctypes.memmove
    for source, target, nbytes in zip(*(column[first:last].tolist() for column in (src, dst, size)), strict=True):
        move(target, source, nbytes)


def load() -> None:
    """Do nothing: there are no loops to load."""
