"""What goes wrong on the command line: one line on stderr, the right exit code, never a traceback."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from kvplan.cli import main
from tests.commands import GPU, HOST, fails


def test_a_file_of_one_word_needs_no_slash(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dump").write_text(Path(GPU).read_text())
    assert main(["inspect", "dump", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["layers"] == list(range(80))
    assert "unknown axis 'dumb'" in fails(capsys, "inspect", "dumb")


def test_without_rich(capsys, monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "rich"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "rich", None)
    for argv in (["inspect", GPU], ["plan", GPU, HOST, "--src", "0", "--dst", "0"], ["backends"]):
        assert fails(capsys, *argv) == "needs rich; pip install rich"
        assert main([*argv, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)


def test_an_interrupt_is_one_line(capsys, monkeypatch):
    import kvplan.cli.layouts

    def interrupted(args, tell):
        raise KeyboardInterrupt

    monkeypatch.setattr(kvplan.cli.layouts, "run_inspect", interrupted)
    assert fails(capsys, "inspect", GPU, code=130) == "interrupted"
