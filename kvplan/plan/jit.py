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


def compiled(function: Callable[..., Any]) -> Any:
    """Make ``function`` a numba dispatcher, which is compiled at its first call and kept on disk.

    A fork waits while numba compiles: otherwise the child would inherit numba's lock, and nobody would release it. If
    numba finds no directory where it may write, each process compiles for itself.
    """
    try:
        made: Any = njit(cache=True, nogil=True, boundscheck=False)(function)
    except RuntimeError as error:
        if "cannot cache" not in str(error):
            raise
        made = njit(nogil=True, boundscheck=False)(function)
    made.compile = partial(_compile, made.compile)  # the dispatcher calls it for new types
    return made


def _compile(compile_for: Callable[[Any], Any], signature: Any) -> Any:
    with compiling():
        return compile_for(signature)
