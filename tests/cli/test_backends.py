"""What `kvplan backends` answers."""

from __future__ import annotations

import sys

import pytest

import kvplan.backends
from tests.commands import ROOT, answer, document


@pytest.fixture
def adapters(tmp_path, monkeypatch):
    """A folder of adapters in place of the real ones."""
    monkeypatch.setattr(kvplan.backends, "__path__", [str(tmp_path)])
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("kvplan.backends.made_up")]:
        del sys.modules[name]


def test_backends_names_every_adapter(capsys):
    adapters = {adapter["name"]: adapter for adapter in document(capsys, "backends")["backends"]}
    found = {path.stem for path in (ROOT / "backends").glob("[!_]*.py")}
    assert set(adapters) == found
    assert all(one["summary"] and one["signature"].startswith("describe(") for one in adapters.values())


def test_backends_reads_well(capsys, adapters):
    (adapters / "made_up.py").write_text(
        '"""One line.\n\nMore."""\n\ndef describe(kv: "list", *, x="HND") -> int: ...\n'
    )
    assert answer(capsys, "backends") == "made_up  One line.\n         describe(kv, *, x='HND')\n"


def test_a_broken_adapter_is_a_finding(capsys, adapters):
    (adapters / "made_up.py").write_text("import nowhere")
    error = "ModuleNotFoundError: No module named 'nowhere'"
    assert answer(capsys, "backends", code=1) == f"made_up  cannot be imported: {error}\n"
    assert document(capsys, "backends", code=1) == {
        "schema": "kvplan.backends/1",
        "backends": [{"name": "made_up", "summary": None, "signature": None, "error": error}],
    }


def test_no_adapters_at_all(capsys, adapters):
    assert answer(capsys, "backends") == "none  no adapter is installed\n"
    assert document(capsys, "backends")["backends"] == []
