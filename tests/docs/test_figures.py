"""Every block of Python in the documents runs; numbers of the README come from a recorded file."""

from __future__ import annotations

import json
import re

import pytest

from benchmarks import readme
from tests.docs.documents import DOCUMENTS, ROOT


@pytest.mark.slow
@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_the_python_in_a_document_runs(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    namespace: dict[str, object] = {}
    for block in re.findall(r"^```python\n(.*?)^```", path.read_text(), re.DOTALL | re.MULTILINE):
        exec(compile(block, str(path), "exec"), namespace)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(path):
    for target in re.findall(r"\]\(([^)#:]+)\)", path.read_text()):
        assert (path.parent / target).exists(), target


def test_the_readme_s_numbers_are_those_of_a_recorded_run():
    text = (ROOT / "README.md").read_text()
    assert readme.table() in text
    assert readme.gpu_table() in text
    assert readme.choice_table() in (ROOT / "docs" / "cost-model.md").read_text()
    assert readme.batch_table() in (ROOT / "docs" / "gpu.md").read_text()
    assert readme.vllm_table() in (ROOT / "docs" / "engines.md").read_text()
    assert readme.offload_table() in (ROOT / "docs" / "engines.md").read_text()
    assert readme.ranks_table() in (ROOT / "docs" / "ranks.md").read_text()


def test_our_own_limits_stand_with_the_benchmarks_and_not_in_the_readme():
    held = readme.limits_tables()
    assert held in (ROOT / "benchmarks" / "README.md").read_text()
    for result in readme.LIMITED.values():
        rows = json.loads(result.read_text())["rows"]
        limited = [row for row in rows if row["limit"] is not None]
        assert limited
        for row in limited:
            line = next(one for one in held.splitlines() if one.startswith(f"| {row['group']}: {row['what']} |"))
            assert line.endswith("| yes |" if row["ok"] else "| no |")
    assert "missed" not in (ROOT / "README.md").read_text()
