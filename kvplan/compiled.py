"""The planner's compiled loops, without loading numba before the first plan."""

from __future__ import annotations

from functools import cache
from types import ModuleType


@cache
def loops() -> ModuleType:
    """:mod:`kvplan.expand`. An import statement in a function costs a third of a microsecond a call; this does not."""
    from kvplan import expand

    return expand
