"""`kvplan report`: one page, whole, of its own."""

from __future__ import annotations

import base64
import re
from html.parser import HTMLParser
from xml.etree import ElementTree as ET

import pytest

from kvplan.cli.main import main
from tests.commands import GPU, HOST, ROOT

VOID = {"meta", "img", "br"}


class Checked(HTMLParser):
    """Tags are balanced; what is fetched, and what is said."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []
        self.said: list[str] = []

    def handle_starttag(self, tag, attrs):
        if tag not in VOID:
            self.open.append(tag)
        self.fetched += [value for name, value in attrs if name in ("src", "href") and value]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.said.append(data)


def report(capsys, tmp_path, *argv: str) -> tuple[int, Checked, str]:
    path = tmp_path / "report.html"
    code = main(["report", *argv, "--output", str(path)])
    out = capsys.readouterr().out
    made = path.read_text()
    assert len(made.encode()) < 1 << 20
    checked = Checked()
    checked.feed(made)
    checked.close()
    assert not checked.open
    assert all(one.startswith(("#", "data:image/svg+xml;base64,")) for one in checked.fetched), "nothing is fetched"
    assert not re.search(r"@import|url\(|<script|<link", made)
    for one in checked.fetched:
        if one.startswith("data:"):
            assert ET.fromstring(base64.b64decode(one.partition(",")[2])).tag.endswith("svg")
    assert not list(tmp_path.glob(".*.part"))
    return code, checked, out


@pytest.mark.slow
def test_a_pair_with_a_plan(capsys, tmp_path):
    code, page, out = report(capsys, tmp_path, HOST, GPU, "--blocks", "0-15", "--profile", "h100")
    said = " ".join(page.said)
    assert code == 0
    assert "Verdict, Layouts, Difference, Program, Plan, Verification, Machine" in out
    assert sum(one.startswith("data:") for one in page.fetched) == 3
    for words in (
        "a block is 160 extents of 8,192 bytes",
        "kernel is taken",
        "2560*[8192]",
        "no CUDA driver",
        "3,932,160 bytes arrived where they belong",
    ):
        assert words in said


def verdict(tmp_path) -> str:
    made = (tmp_path / "report.html").read_text()
    return made[made.index("<h2>Verdict</h2>") : made.index("<h2>Layouts</h2>")]


@pytest.mark.slow
def test_the_page_opens_with_the_verdict(capsys, tmp_path):
    pair = (GPU, str(ROOT / "examples" / "specs" / "host_token_major.toml"))
    report(capsys, tmp_path, *pair, "--blocks", "0-3")
    shown = verdict(tmp_path)
    for words in (
        "<th>runs</th><td>2,560 runs of 512 bytes a unit of 16 tokens</td>",
        "<th>verified</th><td>every byte arrived, there and back: see Verification</td>",
        "<td>best</td><td>block layer kv token head dim</td>",
        "<th>path</th><td>kernel is taken: ",
    ):
        assert words in shown


def test_one_layout_and_an_address(capsys, tmp_path):
    code, page, out = report(capsys, tmp_path, GPU, "--which", "16@0x7f0000002000")
    assert code == 0
    assert "Layout, Address, Machine" in out
    assert "layer 0 k, block 1, token 0 (of 16), head 0 (of 2)" in " ".join(page.said)
