"""What `kvplan inspect` and `which` answer of files, models and dumps, their numbers computed by hand."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from xml.etree import ElementTree as ET

import numpy as np
import pytest

from kvplan import KVLayout
from kvplan.catalogue.models import models
from tests.commands import GPU, ROOT, answer, document, fails


def test_picture_files(capsys, tmp_path):
    svg = tmp_path / "block.svg"
    svg.write_text("what was there")
    answer(capsys, "inspect", GPU, "--svg", str(svg))
    assert ET.parse(svg).getroot().tag.endswith("svg")
    assert [path.name for path in tmp_path.iterdir()] == ["block.svg"]


def test_a_file_of_one_word_needs_no_slash(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    Path("dump").write_text(Path(GPU).read_text())
    assert document(capsys, "inspect", "dump")["layers"] == list(range(80))
    assert "unknown axis 'dumb'" in fails(capsys, "inspect", "dumb")


def test_the_padding_after_the_last_page_counts_where_the_allocation_is_known(capsys, tmp_path):
    pages, path = np.zeros((3, 80), np.uint8), str(tmp_path / "dump.json")
    KVLayout.from_tensors("block dim", pages[:, :64]).save(path)
    text = answer(capsys, "inspect", path)
    assert "padding     48 bytes, 20 %\n            between 32 bytes, after 16 bytes, block 16 bytes\n" in text
    facts = document(capsys, "inspect", path)
    assert (facts["regions"][0]["nbytes"], facts["nbytes"], facts["padding_nbytes"]) == (240, 192, 48)


def test_the_addresses_of_a_dump_are_the_engine_s(capsys, tmp_path):
    tensor = np.zeros((8, 4, 16), np.int8)
    KVLayout.from_tensors("block token dim", tensor).save(tmp_path / "a.json")
    path, address = str(tmp_path / "a.json"), tensor.ctypes.data + 64 + 16
    text = answer(capsys, "which", f"16@{address:#x}", path)
    assert text.splitlines()[0].split(maxsplit=1)[1] == "block token dim, addresses of the process that saved it"
    assert "layer 0 kv, block 1, token 1 (of 4)" in text
    facts = document(capsys, "inspect", path)
    assert (facts["addresses"], facts["virtual"]) == ("dump", False)


@pytest.mark.parametrize("name", models())
def test_every_model_fits_80_columns(capsys, name):
    text = answer(capsys, "inspect", f"--model={name}")
    assert max(map(len, text.splitlines())) <= 80
    advice = [part for part in text.split("\norders of the host, ")[1:]]
    assert len({part.partition("\n")[2].partition("\nbest  ")[0] for part in advice}) == len(advice), "once"


def test_the_manual_shows_what_is_printed(capsys):
    text = (ROOT / "docs" / "reference" / "cli.md").read_text(encoding="utf-8")
    command, shown = re.search(r"```console\n\$ kvplan (inspect --model [^\n]*)\n(.*?)```", text, re.DOTALL).groups()
    assert answer(capsys, *shlex.split(command)) == shown
