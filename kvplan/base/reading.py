"""Read JSON and TOML as plain tables, within bounds."""

from __future__ import annotations

import errno
import json
import re
import tomllib
from pathlib import Path
from typing import Any

from kvplan.base.limits import LIMITS
from kvplan.base.quoting import quoted
from kvplan.errors import LayoutError

_DOTTED = re.compile(r"[^.]\.")


def read_whole(path: Path, most: int = LIMITS.json_nbytes) -> str:
    """Read the text of a file. Devices and pipes raise an error, because they may never end.

    Args:
        path: the file.
        most: largest size in bytes.

    Raises:
        OSError: the file cannot be read, is a device or a pipe, or is too large.
        UnicodeDecodeError: the content is not UTF-8.
    """
    if path.exists() and not path.is_file() and not path.is_dir():
        raise OSError(errno.EINVAL, "a device or a pipe, not a file")
    with path.open("rb") as file:
        raw = file.read(most + 1)
    if len(raw) > most:
        raise OSError(errno.EFBIG, f"more than {most:,} bytes")
    return raw.decode().replace("\r\n", "\n").replace("\r", "\n")


def why_unread(error: OSError | UnicodeDecodeError) -> str:
    """Return the reason why a file could not be read, without its name.

    >>> why_unread(FileNotFoundError(2, "No such file or directory", "a.toml"))
    'No such file or directory'
    """
    return str(getattr(error, "strerror", None) or error)


def json_of(text: str | bytes) -> Any:
    """Parse a JSON text.

    Raises:
        LayoutError: the text is not UTF-8 or not JSON, is too long, is nested too deeply, has a number of thousands of
            digits, or has a key twice in one table.

    >>> json_of('{"a": [1, 2]}')
    {'a': [1, 2]}
    """
    if len(text) > LIMITS.json_nbytes:
        raise LayoutError(f"more than {LIMITS.json_nbytes:,} bytes")
    try:
        return json.loads(text if isinstance(text, str) else text.decode(), object_pairs_hook=_unique)
    except LayoutError:
        raise
    except RecursionError:
        raise LayoutError("nested too deeply") from None
    except ValueError as error:  # not JSON, not UTF-8, or a number of thousands of digits
        raise LayoutError(str(error)) from None


def toml_of(text: str) -> dict[str, Any]:
    """Parse a TOML text.

    Raises:
        LayoutError: as :func:`json_of`; or a line has many dots, because a key of many parts takes a long time to read.

    >>> toml_of("a.b = 1")
    {'a': {'b': 1}}
    """
    if len(text) > LIMITS.toml_nbytes:
        raise LayoutError(f"more than {LIMITS.toml_nbytes:,} bytes; write a long document as JSON")
    for number, line in enumerate(text.split("\n"), start=1):
        if sum(1 for _ in _DOTTED.finditer(line)) > LIMITS.toml_dots:
            raise LayoutError(f"over {LIMITS.toml_dots} dots in line {number}; a key has fewer parts")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise LayoutError("nested too deeply") from None
    except ValueError as error:
        raise LayoutError(str(error)) from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        twice = next(key for k, (key, _) in enumerate(pairs) if any(key == other for other, _ in pairs[:k]))
        raise LayoutError(f"{quoted(twice)} is twice in one table")
    return made
