"""Which loops plan: numba's, loaded with the first plan; or numpy's, for little work in a process that soon ends.

Numba takes half a second to load. A service has that behind it with its first plan; a command that plans once has not.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import ModuleType

from kvplan.base.process import compiling

# Contiguous copies: with so many, numpy is done before numba is loaded, also where each of them is cut at seams.
LITTLE = 1 << 16

_sparing: ContextVar[bool] = ContextVar("kvplan_sparing", default=False)
loaded: ModuleType | None = None  # the compiled loops, once there are: who has them need not count its work


@contextmanager
def sparing(*, wanted: bool = True) -> Iterator[None]:
    """Within, numba is not loaded for little work: for a process that plans once and ends. Results are equal.

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
    """Whether so many contiguous copies are no reason to load numba."""
    return work <= LITTLE and _sparing.get()


def loops_for(work: int) -> ModuleType:
    """The loops to call: :mod:`kvplan.plan.loops_numba`, or :mod:`kvplan.plan.loops_numpy` for little work.

    An import statement in a function costs a third of a microsecond a call; this does not.

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
