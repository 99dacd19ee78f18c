"""What `kvplan backends` answers."""

from __future__ import annotations

import sys

import pytest

import kvplan.backends
from tests.commands import answer, document


@pytest.fixture
def adapters(tmp_path, monkeypatch):
    """A folder of adapters in place of the real ones."""
    monkeypatch.setattr(kvplan.backends, "__path__", [str(tmp_path)])
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("kvplan.backends.made_up")]:
        del sys.modules[name]


def test_a_broken_adapter_is_a_finding(capsys, adapters):
    (adapters / "made_up.py").write_text("import nowhere")
    error = "ModuleNotFoundError: No module named 'nowhere'"
    assert answer(capsys, "backends", code=1) == f"made_up  cannot be imported: {error}\n"
    assert document(capsys, "backends", code=1) == {
        "schema": "kvplan.backends/1",
        "backends": [{"name": "made_up", "summary": None, "signature": None, "error": error}],
    }
