"""Read JSON and TOML as plain tables, within bounds."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from kvplan.base.limits import LIMITS
from kvplan.base.quoting import quoted
from kvplan.errors import LayoutError


def read_whole(path: Path, most: int = LIMITS.json_nbytes) -> str:
    """Read the text of a file. Devices and pipes raise an error, because they may never end.

    Args:
        path: the file.
        most: largest size in bytes.

    Raises:
        LayoutError: the file cannot be read, is too large, or is not UTF-8; the message is the reason.

    >>> read_whole(Path("/nowhere.json"))
    Traceback (most recent call last):
    kvplan.errors.LayoutError: No such file or directory
    """
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            raise LayoutError("a device or a pipe, not a file")
        with path.open("rb") as file:
            raw = file.read(most + 1)
        if len(raw) > most:
            raise LayoutError(f"more than {most:,} bytes")
        return raw.decode()
    except (OSError, ValueError) as error:  # no UTF-8, a null byte in the name
        raise LayoutError(getattr(error, "strerror", None) or str(error)) from None


def json_of(text: str | bytes) -> Any:
    """Parse a JSON text.

    Raises:
        LayoutError: the text is not UTF-8 or not JSON, is too long, is nested too deeply, has a number of thousands of
            digits, or has a key twice in one table.

    >>> json_of('{"a": [1, 2]}')
    {'a': [1, 2]}
    """
    return _parsed(partial(json.loads, object_pairs_hook=_unique), text, LIMITS.json_nbytes)


def toml_of(text: str) -> dict[str, Any]:
    """Parse a TOML text.

    Raises:
        LayoutError: as :func:`json_of`.

    >>> toml_of("a.b = 1")
    {'a': {'b': 1}}
    """
    made: dict[str, Any] = _parsed(tomllib.loads, text, LIMITS.toml_nbytes)
    return made


def _parsed(parse: Callable[[Any], Any], text: str | bytes, most: int) -> Any:
    if len(text) > most:
        raise LayoutError(f"more than {most:,} bytes")
    try:
        return parse(text)
    except RecursionError:
        raise LayoutError("nested too deeply") from None
    except ValueError as error:
        raise LayoutError(str(error)) from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        keys = [key for key, _ in pairs]
        raise LayoutError(f"{quoted(max(made, key=keys.count))} is twice in one table")
    return made
