"""Which process this is, and what a fork must wait for.

The number is told without a system call: those cost microseconds in a sandbox, and a submit asks twice.
"""

from __future__ import annotations

import os
import threading
from contextlib import AbstractContextManager
from typing import Any

from kvplan.errors import TransferError

COMPILE_SECONDS = 30.0  # that a fork waits for what is being compiled, at most; then the child has a lock of its own


class _Process:
    forks = 0
    lock = threading.RLock()


_forking = threading.local()  # `waited`: whether this thread's fork got the lock


def generation() -> int:
    """How often this process was forked from one that had loaded kvplan: what was made in another has another number.

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
    return _Process.lock


def _wait() -> None:
    _forking.waited = False
    _forking.waited = _Process.lock.acquire(timeout=COMPILE_SECONDS)


def _go_on() -> None:
    if _forking.waited:
        _forking.waited = False
        _Process.lock.release()


def _forked() -> None:
    _Process.forks += 1
    if _forking.waited:
        _go_on()
    else:
        _Process.lock = threading.RLock()


os.register_at_fork(before=_wait, after_in_parent=_go_on, after_in_child=_forked)
