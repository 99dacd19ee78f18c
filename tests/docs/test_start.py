"""The README and the pages of *Start* work as printed: each block in its order, in an empty folder."""

from __future__ import annotations

import pytest

from kvplan.cli import main
from tests.docs.documents import ROOT
from tests.docs.fenced import BLOCKS, COMMANDS, FOREIGN

pytestmark = [pytest.mark.slow, pytest.mark.slow]

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs" / "start").glob("*.md"))]
ELSEWHERE = (*FOREIGN, "make", "pip", "python")  # fenced.py says why, and what runs them
MOST_LINES = 150


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_a_page_works_as_printed_in_an_empty_folder(path, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {}
    done = 0
    for block in (one for one in BLOCKS if one.path == path):
        if block.kind == "python":
            exec(compile(block.body, f"{path}:{block.line}", "exec"), namespace)
            done += 1
        elif block.kind == "console":
            for command in (one for one in COMMANDS if one.block == block):
                if command.not_run is None:
                    assert main(command.words[1:]) == 0, capsys.readouterr().err
                    done += 1
                else:
                    assert command.words[0] in {"kvplan", *ELSEWHERE}, command.where
    assert done or path.stem == "vllm", "vLLM's own environment runs that page"


def test_the_readme_is_short_and_shows_no_limits_of_ours():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MOST_LINES
    assert "missed" not in text
    first = text[: text.index("## Two commands")]
    assert all(
        word in first
        for word in ("vllm serve", "--kv-transfer-config", "SGLang", "LMCache", "kvplan.compile", "gain.svg")
    )
    assert "## When you do not need kvplan" in text


def test_every_page_of_start_says_how_to_begin_and_how_to_switch_it_off():
    for path in PAGES[1:]:
        titles = [line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("## ")]
        if path.stem != "your-engine":
            assert any("Start" in title or "Switch it on" in title for title in titles), path
            assert any("witch" in line for line in path.read_text(encoding="utf-8").splitlines()), path
