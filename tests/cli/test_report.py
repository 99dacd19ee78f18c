"""`kvplan report`: one page, whole, of its own."""

from __future__ import annotations

import base64
import re
from html.parser import HTMLParser
from xml.etree import ElementTree as ET

import pytest

from kvplan.cli.main import main
from tests.commands import GPU, HOST


class Page(HTMLParser):
    """Tags are balanced; what is fetched, and what is said."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []
        self.said: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        if tag not in {"meta", "img", "br"}:
            self.open.append(tag)
        self.fetched += [value for name, value in attrs if name in ("src", "href") and value]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.said.append(data)


PAIR = ("Verdict, Layouts, Difference, Program, Plan, Verification, Machine", 3, (
    "a block is 160 extents of 8,192 bytes", "160 runs of 8 KiB a unit of 16 tokens", "kernel is taken", "2560*[8192]",
    "every byte arrived, there and back: see Verification", "3,932,160 bytes arrived where they belong",
))  # fmt: skip
ONE = ("Layout, Address, Machine", 1, ("layer 0 k, block 1, token 0 (of 16), head 0 (of 2)", "no CUDA driver"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("argv", "sections", "pictures", "words"),
    [((HOST, GPU, "--blocks", "0-15", "--profile", "h100"), *PAIR), ((GPU, "--which", "16@0x7f0000002000"), *ONE)],
    ids=["pair", "one"],
)
def test_a_page(capsys, tmp_path, argv, sections, pictures, words):
    path = tmp_path / "report.html"
    assert main(["report", *argv, "--output", str(path)]) == 0
    assert sections in capsys.readouterr().out
    text = path.read_text()
    assert len(text.encode()) < 1 << 20
    assert not re.search(r"@import|url\(|<script|<link", text)
    page = Page(text)
    data = [base64.b64decode(each.partition(",")[2]) for each in page.fetched if not each.startswith("#")]
    assert [ET.fromstring(each).tag.endswith("svg") for each in data] == [True] * pictures, "nothing else is fetched"
    said = " ".join(page.said)
    assert [each for each in words if each not in said] == []
