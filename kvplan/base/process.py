"""Forks and exits: a number that differs between a process and its parent, a lock for compilers, hooks of exits."""

from __future__ import annotations

import atexit
import logging  # noqa: F401  # see the end of this file
import os
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

from kvplan.errors import TransferError

_forks = 0
_compiling = threading.RLock()


def generation() -> int:
    """Return the number of forks from the process that loaded kvplan to this process: a child has one more.

    It makes no system call, as ``os.getpid`` does, which in a sandbox takes a sixth of a submit.

    >>> generation() == generation()
    True
    """
    return _forks


def check_process(made: int) -> None:
    """Raise TransferError if an executor of this generation is the parent's; its locks may never be released."""
    if made != _forks:
        raise TransferError("executors do not survive a fork, and this one is the parent's; make one in the child")


def compiling() -> AbstractContextManager[Any]:
    """Make forks wait until a ``with`` block ends: a child would inherit held locks of compilers and imports."""
    return _compiling


def _forked() -> None:
    global _forks
    _forks += 1
    _compiling.release()


# ---- exits -------------------------------------------------------------------------------------------------------

AGENTS, EXECUTORS, POOLS = range(3)  # the order of an exit: who uses the others ends first

_steps: dict[Callable[[], None], int] = {}
_hooked: set[int] = set()  # generations


def at_exit(turn: int, step: Callable[[], None]) -> None:
    """Call a step once when this process ends normally, and when a child that it forks does.

    Children of multiprocessing, such as engines' workers, may run no ``atexit`` functions; it has hooks of its own.

    Args:
        turn: ``AGENTS``, ``EXECUTORS`` or ``POOLS``.
        step: function without arguments; the same one may be given many times.
    """
    _steps[step] = turn
    multiprocessing: Any = sys.modules.get("multiprocessing")
    if multiprocessing is not None and multiprocessing.parent_process() is not None:
        if _forks not in _hooked:
            multiprocessing.util.Finalize(None, _end, exitpriority=0)
    elif not _hooked:
        atexit.register(_end)
    _hooked.add(_forks)


def _end() -> None:
    with ExitStack() as steps:  # each is called, also if another one fails
        for step in sorted(_steps, key=_steps.__getitem__, reverse=True):
            steps.callback(step)


# Logging must be loaded before this. Hooks run in reverse order, so a fork takes the lock above before the lock of
# logging, which compilers take, too.
os.register_at_fork(before=_compiling.acquire, after_in_parent=_compiling.release, after_in_child=_forked)
