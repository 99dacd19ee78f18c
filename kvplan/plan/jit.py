"""Compile loops with numba, kept on disk; a fork waits meanwhile."""

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
    """Make ``function`` a numba dispatcher, compiled at its first call and kept on disk.

    A fork waits while it is compiled: otherwise the child would hold numba's lock for ever. Where numba may write in no
    directory, each process compiles for itself.
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
