"""The notebook runs from its first cell to its last, and answers as it is shown."""

from __future__ import annotations

import re

import pytest

from tests.docs.fenced import ROOT
from tests.patience import PATIENCE

nbformat = pytest.importorskip("nbformat", reason="the notebook's packages are not installed")
nbclient = pytest.importorskip("nbclient", reason="the notebook's packages are not installed")

pytestmark = pytest.mark.slow

NOTEBOOK = ROOT / "examples" / "tour.ipynb"
ADDRESS = re.compile(r"0x[0-9a-f]{6,}")


def said(cell):
    """What a cell answers, as text; addresses differ from run to run."""
    texts = [output.get("text") or output.get("data", {}).get("text/plain", "") for output in cell.outputs]
    return [ADDRESS.sub("0x", text) for text in texts]


def shown(cell):
    """The forms of a cell's answers."""
    return [sorted(output.get("data", {})) for output in cell.outputs]


def test_the_tour_answers_as_shown(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")
    kept = nbformat.read(NOTEBOOK, as_version=4)
    again = nbformat.read(NOTEBOOK, as_version=4)
    nbclient.NotebookClient(again, timeout=int(PATIENCE), resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert not list(tmp_path.iterdir())
    cells = [(one, other) for one, other in zip(kept.cells, again.cells, strict=True) if one.cell_type == "code"]
    assert len(cells) >= 8
    for one, other in cells:
        assert said(one) == said(other), one.source
        assert shown(one) == shown(other), one.source
    pictures = [
        output for one, _ in cells for output in one.outputs if "<svg" in output.get("data", {}).get("text/html", "")
    ]
    assert len(pictures) >= 3
