"""Forks and exits: a number that differs between a process and its parent, a lock that a fork waits for, exit hooks.

A forked child inherits held locks of imports and compilers, which no thread of the child would release. So a fork waits
until these locks are free. Executors do not survive a fork: each executor stores the number of its process.
"""

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

COMPILE_SECONDS = 30.0  # the longest time that a fork waits for a compiler; then the child gets a new lock


class _Process:
    lock: Any = threading.RLock()
    forks = 0
    hooked: int | None = None  # the number of forks when the exit hook was set


class _Forking(threading.local):
    holds = False  # whether this thread's fork has taken the lock


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
    """Make forks wait until a ``with`` block ends: a child would inherit held locks of compilers and imports."""
    return _Process.lock  # type: ignore[no-any-return]


def _wait() -> None:
    _forking.holds = _Process.lock.acquire(timeout=COMPILE_SECONDS)


def _go_on() -> None:
    if _forking.holds:
        _Process.lock.release()


def _forked() -> None:
    _Process.forks += 1
    _Process.lock = threading.RLock()


# ---- exits -------------------------------------------------------------------------------------------------------

AGENTS, EXECUTORS, POOLS = range(3)  # the order of an exit: who uses the others ends first

_steps: dict[int, list[Callable[[], None]]] = {AGENTS: [], EXECUTORS: [], POOLS: []}


def at_exit(turn: int, step: Callable[[], None]) -> None:
    """Call a step once when this process ends normally, and when a child that it forks does.

    Children of multiprocessing, such as engines' workers, may run no ``atexit`` functions; it has hooks of its own.

    Args:
        turn: ``AGENTS``, ``EXECUTORS`` or ``POOLS``.
        step: function without arguments; the same one may be given many times.
    """
    if step not in _steps[turn]:
        _steps[turn].append(step)
    multiprocessing: Any = sys.modules.get("multiprocessing")
    if multiprocessing is not None and multiprocessing.parent_process() is not None:
        if _Process.hooked != _Process.forks:
            _Process.hooked = _Process.forks
            multiprocessing.util.Finalize(None, _end, exitpriority=0)
    elif _Process.hooked is None:
        _Process.hooked = _Process.forks
        atexit.register(_end)


def _end() -> None:
    with ExitStack() as steps:  # each is called, also if another one fails
        for some in reversed(_steps.values()):
            for step in some:
                steps.callback(step)


# Logging must be loaded before this. Hooks run in reverse order, so a fork takes the lock above before the lock of
# logging, which compilers take, too.
os.register_at_fork(before=_wait, after_in_parent=_go_on, after_in_child=_forked)
