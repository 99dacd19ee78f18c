"""The README and the pages of *Start* work as printed: each block in its order, in an empty folder."""

from __future__ import annotations

import pytest

from kvplan.cli import main
from tests.docs.documents import ROOT
from tests.docs.fenced import BLOCKS, COMMANDS, FOREIGN

pytestmark = [pytest.mark.slow, pytest.mark.slow]

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs" / "start").glob("*.md"))]
ELSEWHERE = (*FOREIGN, "make", "pip", "python")  # fenced.py says why, and what runs them


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
    assert done or path.stem in ("vllm", "nixl"), "engines of their own environments run these pages"
