"""The file behind the name of a shared pool."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from kvplan.base.quoting import quoted
from kvplan.errors import LayoutError

FOLDER = Path("/dev/shm")  # noqa: S108  # where shm_open keeps what it names

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}")


def path_of(shared: Any) -> Path:
    """The file behind a name: one of /dev/shm, or, with a slash, any other.

    Raises:
        LayoutError: neither a name nor an absolute path.

    >>> path_of("kv"), path_of("/mnt/huge/kv")
    (PosixPath('/dev/shm/kv'), PosixPath('/mnt/huge/kv'))
    """
    name = os.fspath(shared) if isinstance(shared, os.PathLike) else shared
    if not isinstance(name, str):
        raise LayoutError(f"shared is {quoted(shared)}; give a name, as 'kv', or the absolute path of a file")
    if "/" not in name:
        if not _NAME.fullmatch(name):
            raise LayoutError(
                f"shared is {quoted(name)}; a name has up to 200 letters, digits, '_', '-' and '.', "
                "the first no '-' or '.'"
            )
        return FOLDER / name
    path = Path(name)
    if not path.is_absolute() or ".." in path.parts or "\0" in name or name.endswith("/"):
        raise LayoutError(f"shared is {quoted(name)}; with a slash it is the absolute path of a file, without '..'")
    if len(path.parts) == 2:
        raise LayoutError(
            f"shared is {quoted(name)}, a file of the root folder; write {path.name!r} for {FOLDER / path.name}"
        )
    return path
