"""One way to compile a loop; the planner's and the host path's are made by it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numba import njit, typeof

from kvplan.base.process import compiling

# Of the first array that it sees, numba imports more of numpy: here, where forks wait for it.
_typeof: Any = typeof
_typeof(np.empty(0))


def compiled(function: Callable[..., Any]) -> Any:
    """``function`` as a numba dispatcher, compiled at its first call and kept on disk.

    A fork waits while it is compiled: numba's lock would else be held in the child, for ever.
    Where numba finds no directory that it may write, nothing is kept: each process compiles for itself.
    """
    try:
        made: Any = njit(cache=True, nogil=True, boundscheck=False)(function)
    except RuntimeError as error:
        if "cannot cache" not in str(error):
            raise
        made = njit(nogil=True, boundscheck=False)(function)
    made.compile = partial(_compile, made.compile)  # which the dispatcher calls for types that it has not met
    return made


def _compile(compile_for: Callable[[Any], Any], signature: Any) -> Any:
    with compiling():
        return compile_for(signature)
