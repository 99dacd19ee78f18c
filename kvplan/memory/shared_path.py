"""The file of a shared pool, found by its name, and its page size."""

from __future__ import annotations

import mmap
import os
import re
from math import lcm
from pathlib import Path
from typing import Any

from kvplan.base.values import quoted
from kvplan.errors import LayoutError

FOLDER = Path("/dev/shm")  # where shm_open keeps its files

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}")


def path_of(shared: Any) -> Path:
    """Return the file of a name: in /dev/shm, or at an absolute path if the name has a slash.

    Raises:
        LayoutError: ``shared`` is neither a name nor an absolute path.

    >>> path_of("kv"), path_of("/mnt/huge/kv")
    (PosixPath('/dev/shm/kv'), PosixPath('/mnt/huge/kv'))
    """
    name = os.fspath(shared) if isinstance(shared, os.PathLike) else shared
    if not isinstance(name, str):
        raise LayoutError(f"shared is {quoted(shared)}; give a name, such as 'kv', or the absolute path of a file")
    if "/" not in name:
        if not _NAME.fullmatch(name):
            raise LayoutError(
                f"shared is {quoted(name)}; a name has up to 200 letters, digits, '_', '-' and '.', "
                "and begins with none of '-' and '.'"
            )
        return FOLDER / name
    path = Path(name)
    if not path.is_absolute() or ".." in path.parts or "\0" in name or name.endswith("/"):
        raise LayoutError(
            f"shared is {quoted(name)}; a name with a slash must be the absolute path of a file, without '..'"
        )
    if len(path.parts) == 2:
        raise LayoutError(
            f"shared is {quoted(name)}, a file of the root folder; write {path.name!r} for {FOLDER / path.name}"
        )
    return path


def page_of(fd: int) -> int:
    """Return bytes per page of the file's system. On hugetlbfs pages are large, and files have whole pages."""
    block = os.fstatvfs(fd).f_bsize
    return lcm(mmap.PAGESIZE, block) if 0 < block <= 1 << 30 else mmap.PAGESIZE
