"""Choose the planner's loops: numba's, or numpy's for a small plan of a process that soon ends.

Loading numba takes half a second. A service plans often enough to gain from that; a command that plans once does not.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import ModuleType

from kvplan.base.process import compiling

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
    """Return the module of loops to call: :mod:`kvplan.plan.loops_numba`, or ``loops_numpy`` for a small plan.

    An import statement in the caller would take a third of a microsecond per call.

    Args:
        work: number of contiguous copies, or of units, to plan.
    """
    if loaded is not None:
        return loaded
    if spares(work):
        from kvplan.plan import loops_numpy

        return loops_numpy
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
