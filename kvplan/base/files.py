"""Files: written completely or not at all, read within bounds, as plain tables.

Input that comes from files and other processes is bounded in size, depth, counts and work. Input beyond a bound raises
:class:`kvplan.LayoutError`, so that no file takes more than some seconds and gigabytes. ``docs/reference/limits.md``
names the bounds that a user may meet.
"""

from __future__ import annotations

import json
import os
import threading
import tomllib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from kvplan.base.values import quoted
from kvplan.errors import LayoutError


class LIMITS:
    """All bounds of input."""

    # ---- text --------------------------------------------------------------------------------------------------------

    json_nbytes = 64 << 20  # of a dump, card, spec or config: a million blocks in a table take 16 MiB
    toml_nbytes = 64 << 10  # of a spec written by hand, which usually has hundreds of bytes
    profile_nbytes = 1 << 20  # of a device profile, which has some kilobytes
    name_length = 200  # characters of a part or a peer

    # ---- counts ------------------------------------------------------------------------------------------------------

    layers = 1 << 12  # of a model's config; the deepest models have about 128
    heads = 1 << 16  # KV heads of a model's config; models have up to 256
    nodes = 1 << 21  # what the layouts of one file make us list; see ``WEIGHTS``
    number = 2**31 - 1  # the largest number of a layer or a head

    # ---- work --------------------------------------------------------------------------------------------------------

    overlap_steps = 1 << 21  # of the proof that no two coordinates share a byte: about two seconds
    places = 1 << 25  # (component, block)s that are looked up one by one if tables do not nest
    pieces = 1 << 16  # of the common refinement of two layouts, if splits of their axes do not divide each other
    copies = 1 << 24  # of one unit of memory: 128 layers, K and V, 256 tokens, 256 heads, one copy per row
    listed = 1 << 19  # pieces of memory that a file makes us list: copies of a unit, rows of a search or a drawing


# Nodes that each thing counts for, by the memory and the work that it takes.
WEIGHTS = {
    "a layer and part": 128,  # 128 layers of 128 parts
    "a tensor": 64,  # separate ones of a spec
    "a head": 32,
    "an address": 16,  # of a dump; several of one layer and part, if heads are separate allocations
    "a letter": 16,  # of a notation or a dtype
    "a token slot": 1,  # a context of two million tokens in one block
    "a list": 1 << 15,  # of layouts, which may stand in each other
}


class Budget:
    """The nodes and the work that one document may still take; all layouts of a document share one budget.

    >>> Budget().use("a layer and part", 1 << 30)
    Traceback (most recent call last):
    ...
    kvplan.errors.LayoutError: over 2,097,152 nodes in one file (a layer and part 128, a tensor 64, a head 32, \
an address 16, a letter 16, a token slot 1, a list 32768)
    """

    def __init__(self) -> None:
        self._nodes, self._steps = LIMITS.nodes, LIMITS.overlap_steps

    def use(self, what: str, count: int = 1) -> None:
        """Subtract nodes for some things of one kind, a key of ``WEIGHTS``.

        Raises:
            LayoutError: less than this number is left.
        """
        self._nodes -= WEIGHTS[what] * count
        if self._nodes < 0:
            weights = ", ".join(f"{name} {nodes}" for name, nodes in WEIGHTS.items())
            raise LayoutError(f"over {LIMITS.nodes:,} nodes in one file ({weights})")

    def step(self, count: int) -> None:
        """Subtract steps of the proof that no bytes overlap.

        Raises:
            LayoutError: less than this number is left.
        """
        self._steps -= count
        if self._steps < 0:
            raise LayoutError(
                f"axes interleave in too many ways: whether bytes overlap is not known after {LIMITS.overlap_steps:,} "
                "steps; give strides that nest, each larger than all that it steps over"
            )


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
