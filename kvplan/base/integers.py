"""The one way by which an integer that a caller gave becomes a Python int.

A numpy integer that is kept as it came wraps around in later arithmetic: ``np.uint8(0) + 256`` is 0. Every public
integer therefore comes through here first. Arrays of block ids have their own way: :mod:`kvplan.plan.placement`.
"""

from __future__ import annotations

from operator import index
from typing import Any

from kvplan.base.quoting import quoted
from kvplan.errors import KVPlanError, LayoutError

_LARGEST = 1 << 128


def integer(
    name: str,
    value: Any,
    *,
    least: int | None = None,
    most: int | None = None,
    right: str | None = None,
    error: type[KVPlanError] = LayoutError,
) -> int:
    """A value as a Python int, in a range.

    Args:
        name: what the caller calls it, for the message.
        value: an int, or anything else with ``__index__``: a numpy integer, an array or tensor of one integer. No bool.
        least, most: the range, both ends in it; None: no end.
        right: what would be right, for the message; by default the range.
        error: class of the error.

    Raises:
        KVPlanError: of the class ``error``: no integer, outside the range, or of more than 128 bits.

    >>> import numpy as np
    >>> integer("page_size", np.uint8(64), least=1) * 4
    256
    >>> integer("page_size", True)
    Traceback (most recent call last):
    kvplan.errors.LayoutError: page_size is True; it is an integer
    """
    number = value if type(value) is int else _converted(value)
    if number is None or (least is not None and number < least) or (most is not None and number > most):
        raise error(f"{name} is {quoted(value)}; {right or _range(least, most)}")
    if not -_LARGEST < number < _LARGEST:  # Python prints no number of thousands of digits, as a message would
        raise error(f"{name} is {quoted(value)}; it is an integer of at most 128 bits")
    return number


def optional_integer(
    name: str, value: Any, *, least: int | None = None, most: int | None = None, right: str | None = None,
    error: type[KVPlanError] = LayoutError,
) -> int | None:  # fmt: skip
    """The same of a value that may be left out: None stays None."""
    return None if value is None else integer(name, value, least=least, most=most, right=right, error=error)


def integers(
    name: str, values: Any, *, least: int | None = None, most: int | None = None, right: str | None = None,
    error: type[KVPlanError] = LayoutError,
) -> tuple[int, ...]:  # fmt: skip
    """The same of a sequence, which is read once; a message names the place of the first value that is wrong.

    >>> import numpy as np
    >>> integers("layers", np.array([0, 2, 5], np.int32))
    (0, 2, 5)
    >>> integers("layers", [0, 2.5])
    Traceback (most recent call last):
    kvplan.errors.LayoutError: layers[1] is 2.5; it is an integer
    """
    try:
        given = None if isinstance(values, str) else tuple(values)
    except TypeError:  # also of an array without dims, which has an iterator that refuses
        given = None
    if given is None:
        raise error(f"{name} is {quoted(values)}; give a sequence of integers")
    return tuple(
        integer(f"{name}[{at}]", value, least=least, most=most, right=right, error=error)
        for at, value in enumerate(given)
    )


def _converted(value: Any) -> int | None:
    """A value as an int, or None. Of torch, a bool has ``__index__``."""
    if isinstance(value, bool) or str(getattr(value, "dtype", "")).endswith("bool"):
        return None
    try:
        return index(value)
    except Exception:  # noqa: BLE001  # a foreign ``__index__`` may raise anything, as that of a tensor without memory
        return None


def _range(least: int | None, most: int | None) -> str:
    if least is None:
        return "it is an integer" if most is None else f"it is an integer of at most {most}"
    return f"it is an integer of at least {least}" if most is None else f"it is an integer from {least} to {most}"
