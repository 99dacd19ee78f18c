"""Quote input in error messages, on one line and with bounded length."""

from __future__ import annotations

from collections.abc import Iterable
from reprlib import Repr

from kvplan.errors import bounded

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
