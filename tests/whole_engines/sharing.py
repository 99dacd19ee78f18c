"""Folders that the workers of pytest-xdist share, each filled by the one that comes first."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def shared_folder(tmp_path_factory: Any) -> Path:
    """A folder of all workers of pytest-xdist."""
    own = tmp_path_factory.getbasetemp()
    found: Path = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "shared"
    return found


@contextlib.contextmanager
def filled(folder: Path) -> Iterator[tuple[Path, bool]]:
    """Give a folder, and whether an engine's answer is still to be put there; other processes wait meanwhile."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder, not (folder / "answer.json").exists()
