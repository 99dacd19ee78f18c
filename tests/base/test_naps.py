"""Threads with timed waits block signals: each module that calls ``woken`` says so to its Worker."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from kvplan.base import latch


def naps(text):
    """Whether a module takes ``woken`` from another; and for each Worker that it makes, whether it is told of naps."""
    uses, workers = False, []
    for node in ast.walk(ast.parse(text)):
        uses |= isinstance(node, ast.alias) and node.name == "woken"
        uses |= isinstance(node, ast.Attribute) and node.attr == "woken"
        if isinstance(node, ast.Call) and "Worker" in {getattr(node.func, field, "") for field in ("id", "attr")}:
            told = [word.value for word in node.keywords if word.arg == "naps"]
            workers.append(any(isinstance(value, ast.Constant) and value.value is True for value in told))
    return uses, workers


def test_every_thread_that_naps_blocks_signals():
    """``woken`` is right only there."""
    root = Path(latch.__file__).parents[1]
    found = {str(path.relative_to(root)): naps(path.read_text(encoding="utf-8")) for path in root.rglob("*.py")}
    del found["base/latch.py"]
    users = {path: workers for path, (uses, workers) in found.items() if uses}
    assert users == {"agents/settling.py": [True], "agents/by_nixl/nixl_progress.py": [True],
                     "execute/gpu/reaper.py": [True]}  # fmt: skip


@pytest.mark.parametrize(("text", "found"), [
    ("from kvplan.base.latch import woken as taken", (True, [])), ("latch.woken(wake, 1)", (True, [])),
    ("given(latch.woken)", (True, [])), ("# woken\nwoken = _woken(1)", (False, [])),
    ("from kvplan.base.threads import Worker\nWorker(1, naps=True)", (False, [True])),
    ("threads.Worker(naps=later), Worker(1), Worker(naps=False)", (False, [False, False, False])),
])  # fmt: skip
def test_how_that_is_read(text, found):
    assert naps(text) == found
