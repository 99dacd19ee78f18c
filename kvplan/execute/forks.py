"""Which process this is, told without a system call: those cost microseconds in a sandbox, and a submit asks twice."""

from __future__ import annotations

import os
import threading

COMPILE_SECONDS = 30.0  # that a fork waits for what is being compiled, at most


class _Count:
    forks = 0


def generation() -> int:
    """How often this process was forked from one that had loaded kvplan: what was made in another has another number.

    >>> generation() == generation()
    True
    """
    return _Count.forks


def _forked() -> None:
    _Count.forks += 1


# Held while something is compiled ahead: a child forked meanwhile would inherit locks of imports and of compilers that
# nobody lets go of.
compiling = threading.RLock()
_held = False


def _wait() -> None:
    global _held  # noqa: PLW0603
    _held = compiling.acquire(timeout=COMPILE_SECONDS)


def _go_on() -> None:
    if _held:
        compiling.release()


os.register_at_fork(before=_wait, after_in_parent=_go_on, after_in_child=_go_on)
os.register_at_fork(after_in_child=_forked)
