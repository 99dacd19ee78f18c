"""Which process this is, told without a system call: those cost microseconds in a sandbox, and a submit asks twice."""

from __future__ import annotations

import os


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


os.register_at_fork(after_in_child=_forked)
