"""Errors of kvplan: one class for each kind of mistake.

Every message names the wrong value, its place, and the right value. All errors but :class:`TransferError` are raised
before any byte moves. A message quotes its input shortened; see :mod:`kvplan.base.values`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

MESSAGE = 2000  # characters of a whole message
AROUND = 60  # characters of a long notation that are shown before the wrong place, and from it on


def bounded(text: str, most: int = MESSAGE) -> str:
    """Cut the middle out of a text that has more than ``most`` characters.

    >>> len(bounded("x" * 10**6)), bounded("short"), bounded("a notation", 7)
    (2000, 'short', 'a ...on')
    """
    if len(text) <= most:
        return text
    half = (most - 3) // 2
    return f"{text[: most - 3 - half]}...{text[-half:]}"


class KVPlanError(ValueError):
    """Base of every error that kvplan raises on purpose.

    A message has at most :data:`MESSAGE` characters, even if the input is longer.

    >>> issubclass(KVPlanError, ValueError)
    True
    """

    def __init__(self, *args: object) -> None:
        super().__init__(*(bounded(arg) if isinstance(arg, str) else arg for arg in args))


class NotationError(KVPlanError):
    """A layout notation that cannot be parsed; the message shows the text with a caret under the column.

    Attributes:
        problem: what is wrong there, without the place.
        text: the notation as given.
        column: 1-based column of the wrong place.

    >>> error = NotationError("unknown axis 'heads'", text="block heads", column=7)
    >>> print(error)
    unknown axis 'heads' at column 7
        block heads
              ^
    >>> error.one_line
    "unknown axis 'heads' at column 7: block ^heads"
    """

    def __init__(self, problem: str, *, text: str, column: int) -> None:
        self.problem, self.text, self.column = problem, text, column
        at, shown = column - 1, "".join(mark if mark.isprintable() else " " for mark in text)
        before = "..." * (at > AROUND) + shown[max(at - AROUND, 0) : at]
        after = shown[at : at + AROUND] + "..." * (len(shown) > at + AROUND)
        self._marked = f"{before}^{after}"
        super().__init__(f"{problem} at column {column}\n    {before}{after}\n    {' ' * len(before)}^")

    @property
    def one_line(self) -> str:
        """Return the message on one line, with the caret in the notation, before the wrong place."""
        return f"{str(self).splitlines()[0]}: {self._marked}"

    def __reduce__(self) -> tuple[Any, tuple[str]]:  # otherwise a pool of processes would break by this error
        return partial(NotationError, text=self.text, column=self.column), (self.problem,)


class LayoutError(KVPlanError):
    """Tensors, sizes or a spec that do not make a layout."""


class IncompatibleLayoutsError(KVPlanError):
    """Two layouts between which no copy program exists."""


class BlockIndexError(KVPlanError, IndexError):
    """Block ids or skips that do not fit the layouts."""


class OverlapError(KVPlanError):
    """A plan that would write one destination byte twice, or read a byte that it also writes."""


class HostMemoryError(KVPlanError):
    """Host memory that cannot be shared, or that a GPU cannot reach although the path needs it."""


class PathError(KVPlanError):
    """A plan or device that no path can serve, or not the path that the policy names; the message gives the reason."""


class TransferError(KVPlanError, RuntimeError):
    """A transfer that failed while it ran, or an executor that accepts no more transfers."""
