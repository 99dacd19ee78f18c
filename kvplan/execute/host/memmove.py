"""The host path's hands without numba, for processes that move little and end: one C call a copy.

Twins of the loops in ``memcpy``: their names, their arguments, the same bytes moved.
"""

from __future__ import annotations

import ctypes

from kvplan.layout.strides import Int64Array


def copy_units(
    units: Int64Array, run_src: Int64Array, run_dst: Int64Array, run_size: Int64Array, first: int, last: int,
    streaming: bool,  # as the loop that it stands for is called
) -> None:  # fmt: skip
    """Copies ``first`` to ``last`` of a part, counted unit by unit, and within a unit run by run.

    Args:
        units: (2, n) int64, source and destination address of each unit.
        run_src, run_dst, run_size: offsets and bytes of each copy of a unit.
        first, last: of the copies.
        streaming: without effect.
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
    """Descriptors ``first`` to ``last``."""
    del streaming
    move = ctypes.memmove
    for source, target, nbytes in zip(*(column[first:last].tolist() for column in (src, dst, size)), strict=True):
        move(target, source, nbytes)


def load() -> None:
    """There is nothing to load."""
