"""docs/cli.md tells the truth: its commands run and answer as shown, and every key of every document is named."""

from __future__ import annotations

import re
import shlex

import pytest

from tests.commands import GPU, HOST, ROOT, answer, document

TEXT = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```console\n\$ kvplan ((?:[^\n]*\\\n)*[^\n]*)\n(.*?)```", TEXT, flags=re.DOTALL)


@pytest.mark.parametrize(("command", "shown"), BLOCKS)
def test_commands_answer_as_shown(capsys, monkeypatch, command, shown):
    monkeypatch.chdir(ROOT)
    given = answer(capsys, *shlex.split(command.replace("\\\n", " ")))
    assert given == (shown or given)


def test_every_block_is_run():
    assert len(BLOCKS) == TEXT.count("```console") == 7


@pytest.mark.parametrize(
    "argv",
    [("inspect", GPU), ("plan", GPU, HOST, "--src", "0", "--dst", "0"), ("explain", GPU, HOST), ("backends",)],
    ids=lambda argv: argv[0],
)
def test_every_key_is_documented(capsys, argv):
    facts = document(capsys, *argv)
    section = TEXT[TEXT.index(f"\n`{facts['schema']}`") :]
    assert not [key for key in facts if key != "schema" and f"`{key}`" not in section]
