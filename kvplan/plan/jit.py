"""Compile loops with numba and keep the result on disk. A fork waits while numba compiles."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numba import njit, typeof

from kvplan.base.process import compiling

# Numba imports more of numpy when it sees its first array. That happens here, where forks wait for imports.
_typeof: Any = typeof
_typeof(np.empty(0))


def compiled(function: Callable[..., Any], *, nogil: bool = True) -> Any:
    """Make ``function`` a numba dispatcher, which is compiled at its first call and kept on disk.

    Args:
        function: the loop.
        nogil: whether the loop lets other threads run. A loop of a few microseconds should not: to get the interpreter
            back takes up to 5 ms if another thread computes in Python.

    A fork waits while numba compiles: otherwise the child would inherit numba's lock, and nobody would release it. If
    numba finds no directory where it may write, each process compiles for itself.
    """
    try:
        made: Any = njit(cache=True, nogil=nogil, boundscheck=False)(function)
    except RuntimeError as error:
        if "cannot cache" not in str(error):
            raise
        made = njit(nogil=nogil, boundscheck=False)(function)
    made.compile = partial(_compile, made.compile)  # the dispatcher calls it for new types
    return made


def brief(function: Callable[..., Any]) -> Any:
    """Do as :func:`compiled`, for a loop of a few microseconds, which keeps the interpreter."""
    return compiled(function, nogil=False)


def _compile(compile_for: Callable[[Any], Any], signature: Any) -> Any:
    with compiling():
        return compile_for(signature)
