"""Write a file completely or not at all."""

from __future__ import annotations

import os
import threading
from pathlib import Path


def write_whole(path: Path, content: bytes) -> None:
    """Write to a temporary file, then rename it: a reader sees the old content or the new content, never a part.

    A pipe or a device is written directly: a rename would replace it by a file. A link stays a link, and its target is
    written.

    Args:
        path: the file; its folder exists.
        content: all bytes of the new file.

    Raises:
        OSError: the file cannot be written; its old content stays, and no temporary file is left.
        ValueError: the name holds a null byte.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> write_whole(folder / "note", b"whole")
    >>> [(file.name, file.read_bytes()) for file in folder.iterdir()]
    [('note', b'whole')]
    """
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_file():
        path.write_bytes(content)
        return
    part = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.part")  # one for each writer
    try:
        part.write_bytes(content)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
