"""What `kvplan inspect --model` answers, its numbers computed by hand."""

from __future__ import annotations

import re
import shlex

import pytest

from kvplan.catalogue.models import models
from tests.commands import ROOT, answer


@pytest.mark.parametrize("name", models())
def test_every_model_fits_80_columns(capsys, name):
    assert max(map(len, answer(capsys, "inspect", f"--model={name}").splitlines())) <= 80


def test_the_manual_shows_what_is_printed(capsys):
    text = (ROOT / "docs" / "reference" / "cli.md").read_text(encoding="utf-8")
    command, shown = re.search(r"```console\n\$ kvplan (inspect --model [^\n]*)\n(.*?)```", text, re.DOTALL).groups()
    assert answer(capsys, *shlex.split(command)) == shown
