"""Which process this is.

The number is told without a system call: those cost microseconds in a sandbox, and a submit asks twice.
"""

from __future__ import annotations

import os

from kvplan.errors import TransferError


class _Process:
    forks = 0


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


def _forked() -> None:
    _Process.forks += 1


os.register_at_fork(after_in_child=_forked)
