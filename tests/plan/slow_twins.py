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
def uncompiled(*modules):
    """Run the compiled loops of modules, by default of the planner, as the Python they are written in."""
    modules = modules or (loops_numba,)
    made = [(module, *item) for module in modules for item in vars(module).items() if hasattr(item[1], "py_func")]
    for module, name, loop in made:
        setattr(module, name, loop.py_func)
    try:
        with np.errstate(over="ignore"):  # hashes wrap around
            yield
    finally:
        for module, name, loop in made:
            setattr(module, name, loop)
