"""What a row of refusals is, and what is expected of each.

``REFUSED[name, call, error] = [(*arguments, words), ...]`` adds rows of one call: the public name that refuses, the
function that is given the arguments, the exact class of the error, and what its message must say, whatever its
sentences are: the wrong value, where it stands, what would be right. Words are fragments with " ... " between them,
each of which must occur, in any order. Without an error, each row names its own: ``(*arguments, error, words)``.
Without a call, a row's argument is what is called.

A call runs in an empty folder of its own, so that it may write ``a.json`` and read it.
"""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable, Iterable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from kvplan import KVLayout, KVPlanError
from kvplan.cli import main

MOST, LINE = 600, 2000  # letters of a message, and of a command's line, whatever it quotes


class Refusals:
    """The table; :attr:`rows` are tuples of name, call, error and words."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, Callable[[], object], type[KVPlanError], str]] = []

    def __setitem__(self, key: Any, rows: Iterable[tuple]) -> None:
        name, *call = key if isinstance(key, tuple) else (key,)
        error = call.pop() if call and isinstance(call[-1], type) else None
        for *arguments, words in rows:
            kind = error or arguments.pop()
            self.rows.append((name, partial(*call, *arguments), kind, words))


REFUSED = Refusals()


class UsageError(KVPlanError):
    """Stands for exit status 2 of a command; its message is what went to stderr."""


def command(*arguments: str) -> int:
    """``python -m kvplan`` with these arguments."""
    notes = io.StringIO()
    with contextlib.redirect_stderr(notes), contextlib.redirect_stdout(io.StringIO()) as answer:
        try:
            status = main([*arguments])
        except SystemExit as end:  # argparse
            status = end.code
    if status == 2:
        assert not answer.getvalue(), "what is refused has no answer"
        assert "Traceback" not in notes.getvalue()
        raise UsageError(notes.getvalue())
    return status


def file(content: str | bytes | dict, name: str = "a.json") -> str:
    """A file of this content in the row's folder."""
    text = json.dumps(content) if isinstance(content, dict) else content
    Path(name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return name


def zeros(*shape: int, kind: type = np.uint8) -> np.ndarray:
    return np.zeros(shape, kind)


def tensors(notation: str, *shape: int, kind: type = np.uint8, **options: Any) -> KVLayout:
    """A layout of new memory."""
    return KVLayout.from_tensors(notation, zeros(*shape, kind=kind), **options)


def paged(blocks: int = 8, token: int = 4, head: int = 2, dim: int = 8, **options: Any) -> KVLayout:
    return tensors("block token head dim", blocks, token, head, dim, **options)


@cache
def spec(notation: str = "block dim", device: str = "cpu", dtype: str = "uint8", **sizes: int) -> KVLayout:
    """A layout of no memory."""
    sizes = sizes or {"block": 4, "dim": 8}
    return KVLayout.from_spec({"notation": notation, "device": device, "dtype": dtype, "sizes": sizes})
