"""`--help` fits the window, and what it shows as examples runs."""

from __future__ import annotations

import shlex

import pytest

import kvplan
from kvplan.cli.main import COMMANDS, main
from tests.commands import GPU, ROOT

MEASURES = {"demo", "calibrate", "bench"}  # seconds of work, or a GPU; their own tests run them


def help_of(capsys, *command: str) -> str:
    assert main([*command, "--help"]) == 0
    return capsys.readouterr().out


def examples(text: str) -> list[list[str]]:
    """The commands under "example", without what a comment adds."""
    shown = text[text.rindex("\nexample") :].replace("\\\n", " ")
    lines = [line.partition("    ")[0] if "numactl" in line else line for line in shown.splitlines()]
    shown_commands = (line.partition(" > ")[0] for line in lines if line.strip().startswith("kvplan "))
    return [shlex.split(line, comments=True)[1:] for line in shown_commands]


@pytest.mark.parametrize("command", [(), *((name,) for name in COMMANDS), ("inspect", "--model")], ids=" ".join)
@pytest.mark.parametrize("columns", [80, 120])
def test_help_fits_80_columns_and_has_an_example(capsys, monkeypatch, columns, command):
    monkeypatch.setenv("COLUMNS", str(columns))
    text = help_of(capsys, *command)
    assert max(map(len, text.splitlines())) <= columns
    assert examples(text)


@pytest.mark.slow
@pytest.mark.parametrize("command", [(), *((n,) for n in COMMANDS if n not in MEASURES)], ids=" ".join)
def test_examples_of_the_help_run(capsys, monkeypatch, tmp_path, command):
    shown = examples(help_of(capsys, *command))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    kvplan.KVLayout.from_spec(GPU).save("dump.json")
    for argv in shown:
        if "path/to" in " ".join(argv) or argv[0] == "doctor":
            continue
        # An address of the example is none of this dump's: a finding, and told.
        code = 1 if "dump.json" in argv and "which" in argv else 0
        assert main(argv) == code, argv
        assert capsys.readouterr().err == ""
