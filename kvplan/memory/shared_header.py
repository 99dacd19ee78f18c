"""The first page of a shared pool's file: a text that identifies the pool, and a mark that it has users.

The text has a magic line, a state, the geometry, and a token: 32 random hexadecimal digits that identify the pool.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import struct

from kvplan.base.values import quoted
from kvplan.errors import LayoutError

SHOWN = 600  # characters of a geometry in a message
MAGIC = b"kvplan.pool\n"
MAKING, WHOLE = b"making\n", b"whole.\n"

_TOKEN = re.compile(r"[0-9a-f]{32}")
_FLOCK = "hhqqi4x"  # struct flock of Linux: type, whence, start, length, process


def new_header(geometry: str) -> bytes:
    """Return the text of a new pool, with a new token."""
    return MAGIC + MAKING + f"{geometry}\n{os.urandom(16).hex()}\n".encode()


def check_header(header: bytes, page: int) -> None:
    """Raise LayoutError unless a header fits in one page."""
    if len(header) > page:
        text = header[:200].decode(errors="replace")
        raise LayoutError(f"the pool's header takes {len(header)} bytes and must fit in {page}: {text}...")


def header_in(head: bytes) -> tuple[bytes, str]:
    r"""Return the state and geometry in a file's first page, or the bytes at their positions.

    >>> header_in(b"kvplan.pool\nwhole.\nformat 1 | two of 100\n")
    (b'whole.\n', 'format 1 | two of 100')
    """
    state = head[len(MAGIC) : len(MAGIC) + len(WHOLE)] if head.startswith(MAGIC) else b""
    return state, head[len(MAGIC) + len(WHOLE) :].partition(b"\n")[0].decode(errors="replace")


def token_in(head: bytes) -> str:
    r"""Return the token in a file's first page, or "" if it has no token.

    >>> token_in(new_header("two of 100")).isalnum(), token_in(b"kvplan.pool\nwhole.\nformat 1\n")
    (True, '')
    """
    token = head[len(MAGIC) + len(WHOLE) :].partition(b"\n")[2].partition(b"\n")[0].decode(errors="replace")
    return token if _TOKEN.fullmatch(token) else ""


def told(geometry: str) -> str:
    """Return a geometry as a message shows it. The text in a file may have any length and characters."""
    if not geometry.isprintable():
        return quoted(geometry)
    return f"'{geometry}'" if len(geometry) <= SHOWN else f"'{geometry[:SHOWN]}...'"


def mark_use(fd: int) -> None:
    """Mark the file as in use until the descriptor is closed, however the process ends.

    A ``flock`` can be taken, but not queried. If a process took it exclusively to find out, a user that leaves
    meanwhile would see a lock, and not unlink the file. So users also hold a record lock on the first byte.
    """
    with contextlib.suppress(OSError):  # a system without such locks; no process can attach there
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, struct.pack(_FLOCK, fcntl.F_RDLCK, os.SEEK_SET, 0, 1, 0))


def in_use(fd: int) -> bool:
    """Return whether another file descriptor has marked the file."""
    asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0)
    kind, *_ = struct.unpack(_FLOCK, fcntl.fcntl(fd, fcntl.F_OFD_GETLK, asked))
    return bool(kind != fcntl.F_UNLCK)
