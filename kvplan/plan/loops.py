"""The planner's loops: numba's, or those of this module, in numpy, for a small plan of a process that soon ends.

Loading numba takes half a second. A service plans often enough to gain from that; a command that plans once does not.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import ModuleType
from typing import Any

import numpy as np

from kvplan.base.process import compiling
from kvplan.layout.strides import Int64Array

# Contiguous copies. While numba loads, numpy plans at least this many, even if each of them is cut at seams.
LITTLE = 1 << 16

_sparing: ContextVar[bool] = ContextVar("kvplan_sparing", default=False)
loaded: ModuleType | None = None  # numba's loops after they are loaded; callers then need not count their work


@contextmanager
def sparing(*, wanted: bool = True) -> Iterator[None]:
    """Make a context that does not load numba for small plans, for processes that plan once. Results are the same.

    >>> with sparing():
    ...     spares(LITTLE), spares(LITTLE + 1)
    (True, False)
    >>> spares(1)
    False
    """
    token = _sparing.set(wanted)
    try:
        yield
    finally:
        _sparing.reset(token)


def spares(work: int) -> bool:
    """Return whether this number of contiguous copies is too small to load numba for."""
    return work <= LITTLE and _sparing.get()


def loops_for(work: int) -> ModuleType:
    """Return the module of loops to call: :mod:`kvplan.plan.loops_numba`, or this one for a small plan.

    An import statement in the caller would take a third of a microsecond per call.

    Args:
        work: number of contiguous copies, or of units, to plan.
    """
    if loaded is not None:
        return loaded
    if spares(work):
        return sys.modules[__name__]
    return _loaded()


def _loaded() -> ModuleType:
    global loaded
    with compiling():
        from kvplan.plan import loops_numba

        loaded = loops_numba
    return loops_numba


def load() -> None:
    """Load numba's loops, and compile every loop that its cache lacks, so that the first plans need not wait."""
    with compiling():
        _loaded().load()


PLACED, SRC_OUTSIDE, DST_OUTSIDE, TWICE = range(4)  # results of ``place_units``, also of the compiled one


def place_units(
    src_ids: Int64Array, dst_ids: Int64Array, src_skip: int, dst_skip: int, src_axes: Int64Array, dst_axes: Int64Array,
    src_tables: Int64Array, dst_tables: Int64Array, src_blocks: int, dst_blocks: int, seen: Any, out: Int64Array,
) -> tuple[int, int]:  # fmt: skip
    """Fill ``out`` (groups, 2, units) with unit addresses; see :func:`kvplan.plan.loops_numba.place_units`.

    ``seen`` is not needed here.
    """
    del seen
    count = out.shape[2]
    src_ids, dst_ids = src_ids.copy(), dst_ids.copy()
    out[0, 0, : src_ids.size], out[0, 1, : dst_ids.size] = src_ids, dst_ids  # the error message reads the ids there
    for ids, num_blocks, kind in ((src_ids, src_blocks, SRC_OUTSIDE), (dst_ids, dst_blocks, DST_OUTSIDE)):
        outside = np.flatnonzero((ids < 0) | (ids >= num_blocks))
        if outside.size:
            return kind, int(outside[0])
    units = dst_axes.shape[1] - 3
    numbers = (dst_ids[:, None] * units + np.arange(units)).ravel()[dst_skip : dst_skip + count]
    again = np.ones(count, dtype=np.bool_)
    again[np.unique(numbers, return_index=True)[1]] = False
    if again.any():
        return TWICE, int(numbers[np.argmax(again)])
    place_side(src_ids, src_skip, src_axes, src_tables, out[:, 0])
    place_side(dst_ids, dst_skip, dst_axes, dst_tables, out[:, 1])
    return PLACED, 0


def place_side(ids: Int64Array, skip: int, axes: Int64Array, tables: Int64Array, out: Int64Array) -> None:
    """Write the addresses of one side's units to ``out`` (groups, units); see :class:`kvplan.plan.placement.Side`."""
    for group, (base, stride, row) in enumerate(axes[:, :3].tolist()):
        blocks = tables[row, ids] if row >= 0 else ids * stride
        out[group] = (base + blocks[:, None] + axes[group, 3:]).ravel()[skip : skip + out.shape[1]]
