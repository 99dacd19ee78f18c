"""Every block of Python in the documents runs; numbers of the README come from a recorded file."""

from __future__ import annotations

import json
import re

import pytest

from benchmarks import gain, peer_tables, process_tables, readme, stream_wait_table, whole_engines
from benchmarks.engines import pages as engine_pages
from benchmarks.wires import wire_pages
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


def test_the_numbers_are_those_of_recorded_runs():
    speed = readme.SPEED.read_text()
    assert readme.table() in speed
    assert readme.gpu_table() in speed
    assert peer_tables.peer_table() in speed
    assert peer_tables.routes_table() in peer_tables.PAGE.read_text()
    assert readme.choice_table() in readme.COST_MODEL.read_text()
    assert readme.batch_table() in readme.GPU_PAGE.read_text()
    assert readme.vllm_table() in readme.ENGINES.read_text()
    assert readme.offload_table() in readme.ENGINES.read_text()
    sources = (engine_pages, process_tables, stream_wait_table, whole_engines, wire_pages)
    assert all(made in page.read_text() for source in sources for page, _, made in source.pages())
    assert readme.ranks_table() in readme.RANKS.read_text()


def test_the_gains_of_the_readme_are_those_of_recorded_runs():
    assert gain.table() in (ROOT / "README.md").read_text()
    assert gain.PICTURE.read_text(encoding="utf-8") == gain.drawn(), "run: python -m benchmarks.readme"
    for one in gain.gains():
        assert one.best > 0
        assert one.name not in gain.OWN
        assert one.times == pytest.approx(one.best / one.ours if one.unit == "ms" else one.ours / one.best)
    assert [one.link is None for one in gain.gains()] == [False, False, True, False, False, False]


def test_a_gain_is_over_the_best_of_all_baselines(tmp_path, monkeypatch):
    rows = [
        {"group": "staged", "what": "load", "unit": "GB/s", "ours": 50.0,
         "beside": {"one large copy": 55.0, "slow": 5.0, "quick": 40.0}},
        {"group": "8b", "what": "6,000 held: TTFT", "unit": "ms", "ours": 20.0, "beside": {"a": 50.0, "b": 30.0}},
    ]  # fmt: skip
    result = tmp_path / "made.json"
    link = 6000 * gain.SHAPES["8b"].token_nbytes / 0.012  # so that the bytes take 12 ms
    result.write_text(json.dumps({"rows": rows, "facts": {"8b": {"link": link}}}))
    shown = (("copies", result, "staged", "load", ""), ("first token", result, "8b", "6,000 held: TTFT", "vLLM"))
    monkeypatch.setattr(gain, "SHOWN", shown)
    copies, token = gain._gains()
    assert (copies.name, copies.best, copies.times, copies.link) == ("quick", 40.0, 1.25, 55.0)
    assert (token.name, token.best, token.times) == ("vLLM", 30.0, 1.5)
    assert token.link == pytest.approx(12.0)


def test_the_table_between_gpus_leaves_out_what_a_machine_lacks(tmp_path, monkeypatch):
    monkeypatch.setattr(readme, "ROOT", tmp_path)
    monkeypatch.setattr(peer_tables, "ROOT", tmp_path)
    result = tmp_path / "made.json"
    assert peer_tables.peer_table(result) == "<!-- peer numbers -->\n<!-- end of peer numbers -->"
    rows = {(group, what): {} for _, group, what, _ in peer_tables.PEER_SHOWN}
    for _, group, what, baseline in peer_tables.PEER_SHOWN:
        if baseline and baseline != "NCCL send/recv":
            rows[group, what][baseline] = 390.0
    gpu = {"name": "a GPU", "driver": "580", "cuda": "13.0", "devices": 2, "link": "NVLink, 18 links"}
    result.write_text(json.dumps({"machine": {"gpu": gpu}, "versions": {"kvplan": "0.1.0"}, "rows": [
        {"group": group, "what": what, "unit": "us" if group == "few" else "GB/s", "ours": 195.0, "beside": beside}
        for (group, what), beside in rows.items()]}))  # fmt: skip
    made = peer_tables.peer_table(result)
    assert made.startswith("<!-- peer numbers -->\nFrom [made.json]")
    assert "2 x a GPU, NVLink, 18 links, driver 580, CUDA 13.0; kvplan 0.1.0." in made
    assert made.endswith("<!-- end of peer numbers -->")
    assert "| pull, runs of 8 KiB | 195 GB/s | one large copy: 390 GB/s | 0.50 |" in made
    assert "NCCL" not in made
    assert made.count("\n| ") == len(peer_tables.PEER_SHOWN) - 2 + 2


def test_pushes_and_pulls_side_by_side(tmp_path, monkeypatch):
    monkeypatch.setattr(peer_tables, "ROOT", tmp_path)
    result = tmp_path / "made.json"
    assert peer_tables.routes_table(result) == ""
    rows = []
    for k, route in enumerate(("push", "pull")):
        for size in ("512 B", "2 KiB", "8 KiB", "64 KiB", "8 KiB, 16 programs"):
            beside = {"one large copy": 400.0, "torch indexing": 100.0 + k, "copy_engine_2d": 5.0}
            rows.append(("between", f"{route}, {size}", 360.0 + k, beside))
        rows.append(("layouts", f"NHD -> HND, TP 2 -> TP 1, 256 B, {route}", 300.0, {"one large copy": 400.0}))
        for where in ("the GPU of the transfers", "the other GPU"):
            for way in ("one large copy", 'kernel, overlap="decode"', "kernel, 16 programs"):
                what = f"{route} beside decode on {where}, {way}"
                rows += [("beside", what, 178.0 + k, {}), ("beside", f"{what}: compute slower", 1.03, {})]
    gpu = {"name": "a GPU", "driver": "580", "cuda": "13.0", "devices": 2, "link": "PCIe"}
    result.write_text(json.dumps({"machine": {"gpu": gpu}, "rows": [
        {"group": group, "what": what, "ours": ours, "beside": beside,
         "ratios": {name: ours / one for name, one in beside.items()}}
        for group, what, ours, beside in rows]}))  # fmt: skip
    made = peer_tables.routes_table(result).splitlines()
    assert "From [made.json](../../made.json): 2 x a GPU, PCIe, driver 580, CUDA 13.0." in made
    assert "| one large copy | 400 GB/s | 400 GB/s |" in made
    assert "| default policy, runs of 8 KiB, over that copy | 0.90 | 0.90 |" in made
    assert "| NHD to HND, TP 2 to TP 1, runs of 256 B, over that copy | 0.75 | 0.75 |" in made
    assert "| NCCL send/recv | not measured | not measured |" in made
    assert "| torch indexing | 100 GB/s | 101 GB/s |" in made
    assert "| on the other GPU, `kernel, 16 programs` | 178 GB/s, slow-down 1.03 | 179 GB/s, slow-down 1.03 |" in made
    assert made.count("| --- | --- | --- |") == 2


def test_our_own_limits_stand_with_the_benchmarks_and_not_in_the_readme():
    held = readme.limits_tables()
    assert held in (ROOT / "benchmarks" / "README.md").read_text()
    for title, result in readme.LIMITED.items():
        section = held.split(f"**{title}** ", 1)[1].split("\n**", 1)[0]
        rows = json.loads(result.read_text())["rows"]
        limited = [row for row in rows if row["limit"] is not None]
        assert limited
        for row in limited:
            lines = [one for one in section.splitlines() if one.startswith(f"| {row['group']}: {row['what']} |")]
            alike = [one for one in limited if (one["group"], one["what"]) == (row["group"], row["what"])]
            ends = ["| yes |" if one["ok"] else "| no |" for one in alike]  # a figure may have several limits
            assert [line[-len(end) :] for line, end in zip(lines, ends, strict=True)] == ends
    assert "missed" not in (ROOT / "README.md").read_text()
