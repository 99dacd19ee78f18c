"""Forks and exits: a number that differs between a process and its parent, a lock for compilers, hooks of exits.

Also attributes that are computed once, without a lock that a fork could leave held.
"""

from __future__ import annotations

import atexit
import functools
import logging  # noqa: F401  # see the end of this file
import os
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import TYPE_CHECKING, Any

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


# ---- attributes -----------------------------------------------------------------------------------------------------

if TYPE_CHECKING:
    from functools import cached_property as cached_property
else:

    class cached_property(functools.cached_property):  # the name of functools' decorator
        """Compute an attribute once for each object, and keep it in the object's ``__dict__``.

        ``functools.cached_property`` of Python 3.11 holds a lock while it computes. A fork during that time leaves the
        lock held in the child, where no thread releases it. Here two threads that read it at once may both compute, and
        get the first result; the result must not depend on the time of the call.

        >>> class Cache:
        ...     @cached_property
        ...     def nbytes(self):
        ...         print("computed")
        ...         return 4096
        >>> cache = Cache()
        >>> cache.nbytes + cache.nbytes
        computed
        8192
        """

        def __get__(self, instance, owner=None):
            if instance is None:
                return self
            return instance.__dict__.setdefault(self.attrname, self.func(instance))
