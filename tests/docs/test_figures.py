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
    assert readme.peer_table() in text
    assert readme.choice_table() in (ROOT / "docs" / "cost-model.md").read_text()
    assert readme.batch_table() in (ROOT / "docs" / "gpu.md").read_text()
    assert readme.vllm_table() in (ROOT / "docs" / "engines.md").read_text()
    assert readme.offload_table() in (ROOT / "docs" / "engines.md").read_text()
    assert readme.ranks_table() in (ROOT / "docs" / "ranks.md").read_text()


def test_the_table_between_gpus_leaves_out_what_a_machine_lacks(tmp_path, monkeypatch):
    monkeypatch.setattr(readme, "ROOT", tmp_path)
    result = tmp_path / "made.json"
    assert readme.peer_table(result) == "<!-- peer numbers -->\n<!-- end of peer numbers -->"
    rows = {(group, what): {} for _, group, what, _ in readme.PEER_SHOWN}
    for _, group, what, baseline in readme.PEER_SHOWN:
        if baseline and baseline != "NCCL send/recv":
            rows[group, what][baseline] = 390.0
    gpu = {"name": "a GPU", "driver": "580", "cuda": "13.0", "devices": 2, "link": "NVLink, 18 links"}
    result.write_text(json.dumps({"machine": {"gpu": gpu}, "versions": {"kvplan": "0.1.0"}, "rows": [
        {"group": group, "what": what, "unit": "us" if group == "few" else "GB/s", "ours": 195.0, "beside": beside}
        for (group, what), beside in rows.items()]}))  # fmt: skip
    made = readme.peer_table(result)
    assert made.startswith("<!-- peer numbers -->\nBetween GPUs of one process")
    assert "2 x a GPU, NVLink, 18 links, driver 580, CUDA 13.0; kvplan 0.1.0." in made
    assert made.endswith("<!-- end of peer numbers -->")
    assert "| pull, runs of 8 KiB | 195 GB/s | one large copy: 390 GB/s | 0.50 |" in made
    assert "NCCL" not in made
    assert made.count("\n| ") == len(readme.PEER_SHOWN) - 2 + 2


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
