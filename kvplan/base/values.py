"""A caller's values: integers are converted to Python ints, and any value is quoted in messages.

A numpy integer wraps around in later arithmetic: ``np.uint8(0) + 256`` is 0. So every public integer is converted here
first. Arrays of block ids are converted in :mod:`kvplan.plan.placement`. Messages quote input on one line, with bounded
length.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import index
from reprlib import Repr
from typing import Any

from kvplan.errors import KVPlanError, LayoutError, bounded

BOUND = (1 << 128) - 1  # Python cannot print numbers of thousands of digits


def integer(
    name: str,
    value: Any,
    *,
    least: int = -BOUND,
    most: int = BOUND,
    right: str = "",
    error: type[KVPlanError] = LayoutError,
) -> int:
    """Convert a value to a Python int, in a range.

    Args:
        name: the caller's name for the value, for the message.
        value: an int, or an object with ``__index__``, such as a numpy integer or a tensor of one integer; not a bool.
        least, most: smallest and largest right value.
        right: the right values in words, for the message; by default the range.
        error: class of the error.

    Raises:
        KVPlanError: of the class ``error``: the value is not an integer, or out of range.

    >>> import numpy as np
    >>> integer("page_size", np.uint8(64), least=1) * 4
    256
    >>> integer("page_size", True, least=1)
    Traceback (most recent call last):
    kvplan.errors.LayoutError: page_size is True; it is an integer of at least 1
    """
    number = value if type(value) is int else _converted(value)
    if number is None or not least <= number <= most:
        bounds = f" from {least} to {most}" if most < BOUND else f" of at least {least}" * (least > -BOUND)
        raise error(f"{name} is {quoted(value)}; {right or f'it is an integer{bounds}'}")
    return number


def optional_integer(name: str, value: Any, **options: Any) -> int | None:
    """Convert a value as :func:`integer` does, with its options, but return None for None."""
    return None if value is None else integer(name, value, **options)


def integers(name: str, values: Any, *, error: type[KVPlanError] = LayoutError, **options: Any) -> tuple[int, ...]:
    """Convert a sequence, which is read once; an error message names the position of the first wrong value.

    >>> import numpy as np
    >>> integers("layers", np.array([0, 2, 5], np.int32))
    (0, 2, 5)
    >>> integers("layers", [0, 2.5])
    Traceback (most recent call last):
    kvplan.errors.LayoutError: layers[1] is 2.5; it is an integer
    """
    try:
        given = tuple(values)
    except TypeError:  # an array without dims also raises it
        raise error(f"{name} is {quoted(values)}; give a sequence of integers") from None
    return tuple(integer(f"{name}[{at}]", value, error=error, **options) for at, value in enumerate(given))


def _converted(value: Any) -> int | None:
    """Convert a value, or return None. A bool of torch has ``__index__``, too, and is no integer."""
    if isinstance(value, bool) or str(getattr(value, "dtype", "")).endswith("bool"):
        return None
    try:
        return index(value)
    except Exception:  # a foreign ``__index__`` may raise any error, as for a tensor without memory
        return None


QUOTED = 80  # characters of a value that a message quotes
LISTED = 8  # items of a list that a message names


class _Short(Repr):
    """Short texts of values, which may be huge or nested without end."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxstring, self.maxother = 2, QUOTED, QUOTED

    def repr_int(self, x: int, level: int) -> str:  # as reprlib calls it
        """Return a number, which may be too long to print."""
        return repr(x) if abs(x) < 1 << 64 else f"a number of {x.bit_length()} bits"

    def repr_instance(self, x: object, level: int) -> str:
        """Return the ``repr`` of any other value on one line."""
        return " ".join(super().repr_instance(x, level).split())


_short = _Short()


def quoted(value: object) -> str:
    """Return a value's ``repr`` on one line; a long ``repr`` is cut.

    >>> quoted("kv"), quoted(10**30), quoted([7] * 1000), quoted("x" * 1000)[36:48]
    ("'kv'", 'a number of 100 bits', 'a list of 1000', 'xx...xxxxxxx')
    """
    if isinstance(value, list | tuple | set | dict) and len(value) > LISTED:
        return f"a {type(value).__name__} of {len(value)}"
    return bounded(_short.repr(value), QUOTED)


def listed(values: Iterable[object]) -> str:
    """Quote the first values, and count the other values.

    >>> listed(["k", "v"]), listed(range(10))
    ("'k', 'v'", '0, 1, 2, 3, 4, 5, 6, 7 and 2 more')
    """
    every = list(values)
    more = f" and {len(every) - LISTED} more" if len(every) > LISTED else ""
    return ", ".join(map(quoted, every[:LISTED])) + more


def other_case(name: str, known: Iterable[str]) -> str:
    """Return a hint, to end a message, if a known name differs from a name only in letter case; otherwise "".

    >>> other_case("V", ("k", "v")), other_case("v", ("k", "v"))
    ("; 'V' and 'v' differ only in letter case", '')
    """
    near = next((each for each in known if each != name and each.casefold() == name.casefold()), None)
    return "" if near is None or name in known else f"; {quoted(name)} and {quoted(near)} differ only in letter case"
