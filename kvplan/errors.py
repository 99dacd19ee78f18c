"""Errors of kvplan: one class for each kind of mistake.

Every message names the wrong value, its place, and the right value. All errors but :class:`TransferError` are raised
before any byte moves. A message quotes its input shortened; see :mod:`kvplan.base.quoting`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

MESSAGE = 2000  # characters of a whole message
AROUND = 60  # characters of a long notation that are shown before the wrong place, and from it on


def bounded(message: str) -> str:
    """Cut the middle out of a message that has more than :data:`MESSAGE` characters.

    >>> len(bounded("x" * 10**6)), bounded("short")
    (2000, 'short')
    """
    if len(message) <= MESSAGE:
        return message
    half = (MESSAGE - 5) // 2
    return f"{message[: MESSAGE - 5 - half]} ... {message[-half:]}"


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

    >>> print(NotationError("unknown axis 'heads'", text="block heads", column=7))
    unknown axis 'heads' at column 7
        block heads
              ^
    """

    def __init__(self, problem: str, *, text: str, column: int) -> None:
        self.problem = problem
        self.text = text
        self.column = column
        first = max(column - 1 - AROUND, 0) if len(text) > 2 * AROUND else 0
        shown = text[first : first + 2 * AROUND]
        lead, rest = "..." * (first > 0), "..." * (first + len(shown) < len(text))
        caret = " " * (len(lead) + column - 1 - first)
        super().__init__(f"{problem} at column {column}\n    {lead}{shown}{rest}\n    {caret}^")

    def __reduce__(self) -> tuple[Any, tuple[str]]:  # otherwise a pool of processes would break by this error
        return partial(NotationError, text=self.text, column=self.column), (self.problem,)

    @property
    def one_line(self) -> str:
        """Return the message on one line, with the caret in the notation, before the wrong place.

        >>> NotationError("unknown axis 'heads'", text="block heads", column=7).one_line
        "unknown axis 'heads' at column 7: block ^heads"
        """
        at = self.column - 1
        shown = "".join(mark if mark.isprintable() else " " for mark in self.text)
        before, after = shown[max(at - AROUND, 0) : at], shown[at : at + AROUND]
        before = "..." * (at > AROUND) + before
        after += "..." * (len(shown) > at + AROUND)
        return f"{str(self).splitlines()[0]}: {before}^{after}"


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
