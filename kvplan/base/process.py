"""Which process this is, and what a fork must wait for.

A forked child inherits locks of imports and of compilers that nobody lets go of, so a fork waits for them. Executors do
not survive a fork: each remembers the process that made it.
"""

from __future__ import annotations

import logging  # noqa: F401  # see below
import os
import threading
from contextlib import AbstractContextManager
from typing import Any

from kvplan.errors import TransferError

COMPILE_SECONDS = 30.0  # that a fork waits for what is being compiled, at most; then the child has a lock of its own


class _Process:
    lock: Any = threading.RLock()
    forks = 0


class _Forking(threading.local):
    waits = False  # whether this thread's fork took the lock, or was about to


_forking = _Forking()


def generation() -> int:
    """How often this process was forked from one that had loaded kvplan: what was made in another has another number.

    The number is told without a system call: those cost microseconds in a sandbox, and a submit asks twice.

    >>> generation() == generation()
    True
    """
    return _Process.forks


def check_process(made: int) -> None:
    """An executor is of this process. In a forked child a lock may be held that nobody will let go.

    Args:
        made: the generation that it was made in.

    Raises:
        TransferError: that was another process.
    """
    if made != _Process.forks:
        raise TransferError("executors do not survive a fork, and this one is the parent's; make one in the child")


def compiling() -> AbstractContextManager[Any]:
    """Forks wait within a ``with``: a child would inherit locks of imports and of compilers that nobody lets go of.

    It is the lock itself, whose end is a call of C: a generator's could be broken off before it lets go.
    """
    return _Process.lock  # type: ignore[no-any-return]


def compiles() -> bool:
    """Whether the calling thread is within :func:`compiling`: others that compile wait for it then.

    >>> with compiling():
    ...     compiles()
    True
    >>> compiles()
    False
    """
    return bool(_Process.lock._is_owned())


def _wait() -> None:
    _forking.waits = not compiles()  # told before: a signal may come between the lock and a line behind it
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


# Logging is loaded before this: else a fork would take its lock, which compilers take, too, and wait for them then.
os.register_at_fork(before=_wait, after_in_parent=_go_on, after_in_child=_forked)
