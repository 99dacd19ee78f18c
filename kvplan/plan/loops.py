"""Choose the planner's loops: numba's, or numpy's for a small plan of a process that soon ends.

Numba takes half a second to load. That is worth it for a service, and not for a command that plans once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import ModuleType

from kvplan.base.process import compiling

# Contiguous copies: numpy plans this many before numba would be loaded, even if each of them is cut at seams.
LITTLE = 1 << 16

_sparing: ContextVar[bool] = ContextVar("kvplan_sparing", default=False)
loaded: ModuleType | None = None  # numba's loops once they are loaded; callers then need not count their work


@contextmanager
def sparing(*, wanted: bool = True) -> Iterator[None]:
    """Do not load numba for little work inside this context: for processes that plan once. Results are equal.

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
    """Tell whether numba is not worth loading for this many contiguous copies."""
    return work <= LITTLE and _sparing.get()


def loops_for(work: int) -> ModuleType:
    """Return the loops to call: :mod:`kvplan.plan.loops_numba`, or :mod:`kvplan.plan.loops_numpy` for little work.

    An import statement in the caller would cost a third of a microsecond per call.

    Args:
        work: contiguous copies, or units, that are planned.
    """
    return loaded or _chosen(work)


def _chosen(work: int) -> ModuleType:
    if spares(work):
        from kvplan.plan import loops_numpy

        return loops_numpy
    return _loaded()


def _loaded() -> ModuleType:
    global loaded  # noqa: PLW0603
    with compiling():
        from kvplan.plan import loops_numba

        loaded = loops_numba
    return loops_numba


def load() -> None:
    """Load numba's loops, and compile those that its cache lacks, so that the first plans do not wait."""
    with compiling():
        _loaded().load()
