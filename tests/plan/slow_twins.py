"""The planner without its compiled loops: in numpy, and as the loops are written."""

from __future__ import annotations

import sys
from contextlib import contextmanager

import numpy as np
import pytest

from kvplan.plan import loops, loops_numba
from kvplan.plan.loops import sparing


@contextmanager
def without_numba():
    """As in a process that has not loaded the compiled loops and spares them."""
    with pytest.MonkeyPatch.context() as patch, sparing():
        patch.setattr(loops, "loaded", None)
        patch.setitem(sys.modules, "kvplan.plan.loops_numba", None)  # who asks for it fails
        patch.delattr(sys.modules["kvplan.plan"], "loops_numba")
        yield


@contextmanager
def uncompiled():
    """Run the compiled loops as the Python they are written in."""
    made = {name: loop for name, loop in vars(loops_numba).items() if hasattr(loop, "py_func")}
    for name, loop in made.items():
        setattr(loops_numba, name, loop.py_func)
    try:
        with np.errstate(over="ignore"):  # hashes wrap around
            yield
    finally:
        for name, loop in made.items():
            setattr(loops_numba, name, loop)
