"""What a row of refusals is, and what is expected of each.

A row is ``(name, call, error, words)``: the public name that refuses, a call without arguments, the exact class of the
error, and what its message must say, whatever its sentences are: the wrong value, where it stands, what would be right.
Words are fragments with " ... " between them, each of which must occur, in any order. Where many rows are of one call,
:func:`rows` makes them of ``(*arguments, words)``, a line each.

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

Row = tuple[str, Callable[[], object], type[KVPlanError], str]
MOST, LINE = 600, 2000  # letters of a message, and of a command's line, whatever it quotes


def rows(name: str, call: Callable[..., object], error: type[KVPlanError] | None, cases: Iterable[tuple]) -> list[Row]:
    """Rows of one call: ``(*arguments, words)`` each, or ``(*arguments, error, words)`` of several classes."""
    if error is None:
        return [(name, partial(call, *given), kind, words) for *given, kind, words in cases]
    return [(name, partial(call, *given), error, words) for *given, words in cases]


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


def zeros(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.uint8)


def tensors(notation: str, *shape: int, **options: Any) -> KVLayout:
    """A layout of new bytes."""
    return KVLayout.from_tensors(notation, zeros(*shape), **options)


def paged(blocks: int = 8, token: int = 4, head: int = 2, dim: int = 8, notation: str = "block token head dim",
          **options: Any) -> KVLayout:  # fmt: skip
    return tensors(notation, blocks, token, head, dim, **options)


@cache
def spec(notation: str = "block dim", device: str = "cpu", dtype: str = "uint8", **sizes: int) -> KVLayout:
    """A layout of no memory."""
    return KVLayout.from_spec(
        {"notation": notation, "device": device, "dtype": dtype, "sizes": sizes or {"block": 4, "dim": 8}}
    )
