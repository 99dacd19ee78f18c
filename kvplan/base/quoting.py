"""Quote input in error messages, on one line and with bounded length."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice

QUOTED = 80  # characters of a value that a message quotes
LISTED = 8  # items of a list that a message names

_LARGEST = 1 << 64


def quoted(value: object) -> str:
    """Return a value's ``repr`` on one line; a long ``repr`` is cut in the middle.

    The value may be huge, nested without end, a number too long to print, or of a class whose ``repr`` fails.

    >>> quoted("kv"), quoted(10**30), quoted(["full"] * 1000), quoted("x" * 1000)[36:48]
    ("'kv'", 'a number of 100 bits', 'a list of 1000', 'xxx...xxxxxx')
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return repr(value) if -_LARGEST < value < _LARGEST else f"a number of {value.bit_length()} bits"
    if isinstance(value, bytes | bytearray):
        return shortened(repr(bytes(value))) if len(value) <= QUOTED else f"{len(value):,} bytes"
    if isinstance(value, str):
        half = QUOTED // 2  # the middle is cut away, and not read
        return shortened(repr(value if len(value) <= QUOTED else value[:half] + value[-half:]), len(value))
    if isinstance(value, Mapping | list | tuple | set | frozenset) and not _small(value):
        kind = "table" if isinstance(value, Mapping) else type(value).__name__
        return f"a {kind} of {len(value)}"
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001  # a foreign class must not hide the message that quotes it
        text = f"a {type(value).__name__}"
    return shortened(" ".join(text.split()))


def shortened(text: str, given: int = 0) -> str:
    """Cut the middle out of a text that has more than :data:`QUOTED` characters.

    Args:
        text: a text of one line.
        given: length of the input in characters, if ``text`` is only a piece of it.

    >>> len(shortened("x" * 1000)), shortened("short")
    (80, 'short')
    """
    if len(text) <= QUOTED and given <= QUOTED:
        return text
    half = (QUOTED - 3) // 2
    return f"{text[: QUOTED - 3 - half]}...{text[-half:]}"


def listed(values: Iterable[object]) -> str:
    """Quote the first values, and count the other values.

    >>> listed(["k", "v"]), listed(range(10))
    ("'k', 'v'", '0, 1, 2, 3, 4, 5, 6, 7 and 2 more')
    """
    every = list(values)
    told = ", ".join(quoted(value) for value in islice(every, LISTED))
    return told + (f" and {len(every) - LISTED} more" if len(every) > LISTED else "")


def other_case(name: str, known: Iterable[str]) -> str:
    """Return a hint, to end a message, if a known name differs from a name only in letter case; otherwise "".

    >>> other_case("V", ("k", "v")), other_case("v", ("k", "v"))
    ("; 'V' and 'v' differ only in letter case", '')
    """
    near = next((each for each in known if each != name and each.casefold() == name.casefold()), None)
    return "" if near is None or name in known else f"; {quoted(name)} and {quoted(near)} differ only in letter case"


def _small(
    value: Mapping[object, object] | list[object] | tuple[object, ...] | set[object] | frozenset[object],
) -> bool:
    """Return whether a collection is short and flat, so that its ``repr`` is short."""
    if len(value) > LISTED:
        return False
    inside = [*value, *value.values()] if isinstance(value, Mapping) else [*value]
    return all(
        (isinstance(item, int) and -_LARGEST < item < _LARGEST)
        or (isinstance(item, str) and len(item) <= QUOTED)
        or item is None
        or isinstance(item, float)
        for item in inside
    )
