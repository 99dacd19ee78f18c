"""Convert a caller's integers to Python ints, and check their range.

A numpy integer wraps around in later arithmetic: ``np.uint8(0) + 256`` is 0. So every public integer is converted here
first. Arrays of block ids are converted in :mod:`kvplan.plan.placement`.
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
    """Convert a value to a Python int, in a range.

    Args:
        name: the caller's name for the value, for the message.
        value: an int, or an object with ``__index__``, such as a numpy integer or a tensor of one integer; not a bool.
        least, most: smallest and largest right value; None for no bound.
        right: the right values in words, for the message; by default the range.
        error: class of the error.

    Raises:
        KVPlanError: of the class ``error``: the value is not an integer, out of range, or has more than 128 bits.

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
    if not -_LARGEST < number < _LARGEST:  # Python cannot print numbers of thousands of digits
        raise error(f"{name} is {quoted(value)}; it is an integer of at most 128 bits")
    return number


def optional_integer(
    name: str, value: Any, *, least: int | None = None, most: int | None = None, right: str | None = None,
    error: type[KVPlanError] = LayoutError,
) -> int | None:  # fmt: skip
    """Convert a value as :func:`integer` does, but return None for None."""
    return None if value is None else integer(name, value, least=least, most=most, right=right, error=error)


def integers(
    name: str, values: Any, *, least: int | None = None, most: int | None = None, right: str | None = None,
    error: type[KVPlanError] = LayoutError,
) -> tuple[int, ...]:  # fmt: skip
    """Convert a sequence, which is read once; an error message names the position of the first wrong value.

    >>> import numpy as np
    >>> integers("layers", np.array([0, 2, 5], np.int32))
    (0, 2, 5)
    >>> integers("layers", [0, 2.5])
    Traceback (most recent call last):
    kvplan.errors.LayoutError: layers[1] is 2.5; it is an integer
    """
    try:
        given = None if isinstance(values, str) else tuple(values)
    except TypeError:  # an array without dims also raises it
        given = None
    if given is None:
        raise error(f"{name} is {quoted(values)}; give a sequence of integers")
    return tuple(
        integer(f"{name}[{at}]", value, least=least, most=most, right=right, error=error)
        for at, value in enumerate(given)
    )


def _converted(value: Any) -> int | None:
    """Convert a value, or return None. A bool of torch has ``__index__``, too, and is no integer."""
    if isinstance(value, bool) or str(getattr(value, "dtype", "")).endswith("bool"):
        return None
    try:
        return index(value)
    except Exception:  # noqa: BLE001  # a foreign ``__index__`` may raise any error, as for a tensor without memory
        return None


def _range(least: int | None, most: int | None) -> str:
    if least is None:
        return "it is an integer" if most is None else f"it is an integer of at most {most}"
    return f"it is an integer of at least {least}" if most is None else f"it is an integer from {least} to {most}"
