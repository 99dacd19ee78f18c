"""Forks: a number that differs between a process and its parent, and a lock that a fork waits for.

A forked child inherits held locks of imports and compilers, which no thread of the child would release. So a fork waits
until these locks are free. Executors do not survive a fork: each executor stores the number of its process.
"""

from __future__ import annotations

import logging  # noqa: F401  # see the end of this file
import os
import threading
from contextlib import AbstractContextManager
from typing import Any

from kvplan.errors import TransferError

COMPILE_SECONDS = 30.0  # the longest time that a fork waits for a compiler; then the child gets a new lock


class _Process:
    lock: Any = threading.RLock()
    forks = 0


class _Forking(threading.local):
    waits = False  # whether this thread's fork took the lock, or was about to take it


_forking = _Forking()


def generation() -> int:
    """Return the number of forks from the process that loaded kvplan to this process: a child has one more.

    It makes no system call: a system call costs microseconds in a sandbox, and a submit calls this twice.

    >>> generation() == generation()
    True
    """
    return _Process.forks


def check_process(made: int) -> None:
    """Raise TransferError if an executor of this generation is the parent's; its locks may never be released."""
    if made != _Process.forks:
        raise TransferError("executors do not survive a fork, and this one is the parent's; make one in the child")


def compiling() -> AbstractContextManager[Any]:
    """Make forks wait until a ``with`` block ends, because a child would inherit held locks of compilers and imports.

    It returns the lock itself, because one C call releases a lock. A generator could be interrupted before that.
    """
    return _Process.lock  # type: ignore[no-any-return]


def compiles() -> bool:
    """Return whether the calling thread is within :func:`compiling`, so that other threads that compile wait for it.

    >>> with compiling():
    ...     compiles()
    True
    >>> compiles()
    False
    """
    return bool(_Process.lock._is_owned())


def _wait() -> None:
    _forking.waits = not compiles()  # set first: a signal may come between taking the lock and the next line
    if _forking.waits:
        _Process.lock.acquire(timeout=COMPILE_SECONDS)


def _go_on() -> None:
    waits, _forking.waits = _forking.waits, False
    if waits and compiles():
        _Process.lock.release()


def _forked() -> None:
    _Process.forks += 1
    if compiles():
        _go_on()
    else:
        _Process.lock = threading.RLock()


# Logging must be loaded before this. Hooks run in reverse order, so a fork takes the lock above before the lock of
# logging, which compilers take, too.
os.register_at_fork(before=_wait, after_in_parent=_go_on, after_in_child=_forked)
