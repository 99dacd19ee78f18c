"""What `kvplan inspect` answers, its numbers computed by hand."""

from __future__ import annotations

from xml.etree import ElementTree as ET

import numpy as np

from kvplan import KVLayout
from tests.commands import GPU, answer, document

# ---- pictures --------------------------------------------------------------------------------------------------------


def test_picture_by_itself_in_a_terminal_where_it_fits(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    for lines, drawn in (("20", False), ("60", True)):
        monkeypatch.setenv("LINES", lines)
        assert ("160 runs" in answer(capsys, "inspect", GPU)) is drawn
    assert "160 runs" in answer(capsys, "inspect", GPU, "--picture")


def test_picture_files(capsys, tmp_path):
    svg = tmp_path / "block.svg"
    svg.write_text("what was there")
    answer(capsys, "inspect", GPU, "--svg", str(svg))
    assert ET.parse(svg).getroot().tag.endswith("svg")
    assert [path.name for path in tmp_path.iterdir()] == ["block.svg"]


PADDED_PAGES = """\
padding     48 bytes, 20 %
            between 32 bytes, after 16 bytes, block 16 bytes
"""


def test_the_padding_after_the_last_page_counts_where_the_allocation_is_known(capsys, tmp_path):
    pages = np.zeros((3, 80), np.uint8)
    KVLayout.from_tensors("block dim", pages[:, :64]).save(tmp_path / "dump.json")
    assert PADDED_PAGES in answer(capsys, "inspect", str(tmp_path / "dump.json"))
    facts = document(capsys, "inspect", str(tmp_path / "dump.json"))
    assert (facts["regions"][0]["nbytes"], facts["nbytes"], facts["padding_nbytes"]) == (240, 192, 48)
    assert facts["padding"] == {"share": 0.2, "between_nbytes": 32, "before_nbytes": 0, "after_nbytes": 16,
                                "block_nbytes": 16, "unused_nbytes": 0}  # fmt: skip
    assert answer(capsys, "explain", *[str(tmp_path / "dump.json")] * 2, "--no-advice").count("48 bytes, 20 %") == 2
