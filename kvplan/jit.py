"""One way to compile a loop; the planner's and the host path's are made by it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import njit


def compiled(function: Callable[..., Any]) -> Any:
    """``function`` as a numba dispatcher, compiled at its first call and kept on disk.

    Where numba finds no directory that it may write, nothing is kept: each process compiles for itself.
    """
    try:
        return njit(cache=True, nogil=True, boundscheck=False)(function)
    except RuntimeError as error:
        if "cannot cache" not in str(error):
            raise
        return njit(nogil=True, boundscheck=False)(function)
