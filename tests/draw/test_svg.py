"""The SVG of a block: it parses, its labels lie on the page and apart, and it says all that it folds."""

from __future__ import annotations

import re
from itertools import combinations
from xml.etree import ElementTree as ET

import pytest

from kvplan import KVLayout
from kvplan.draw.block import block_picture
from kvplan.draw.svg import MARGIN, STYLE, WIDTH, svg
from kvplan.draw.text import NARROWEST, block_lines
from tests.commands import ROOT, SPECS
from tests.draw.drawn_layouts import CASES, PADDED_PAGE

SVG = "{http://www.w3.org/2000/svg}"
FIELDS = {"kvplan-head": 15, "kvplan-label": 12, "kvplan-small": 11, None: 13}  # sizes of letters, in pixels

# The pictures of the documentation, by the layouts that they show.
PICTURES = {"split-kv-80-layers": SPECS / "gpu_split_kv.toml", "padded-page": PADDED_PAGE}


def svg_of(given, block=0):
    return svg(block_picture(KVLayout.from_spec(given).built, block))


def text_boxes(root):
    """Left, top, right, bottom of every text on the page, by a width that letters have on average."""
    for text in root.iter(f"{SVG}text"):
        size = FIELDS[text.get("class")]
        said = "".join(text.itertext())
        width, x, y = len(said) * size * 0.56, float(text.get("x")), float(text.get("y"))
        left = {"middle": x - width / 2, "end": x - width, None: x}[text.get("text-anchor")]
        yield said, (left, y - size * 0.75, left + width, y + size * 0.2)


def meet(a, b):
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


@pytest.mark.parametrize("name", CASES)
def test_labels_lie_on_the_page_and_apart(name):
    root = ET.fromstring(svg_of(CASES[name], 1))
    _, _, width, height = map(float, root.get("viewBox").split())
    assert width == WIDTH
    boxes = list(text_boxes(root))
    for said, (left, top, right, bottom) in boxes:
        assert left >= MARGIN - 1, said
        assert right <= WIDTH - MARGIN + 1, said
        assert top >= 0, said
        assert bottom <= height, said
    for (one, a), (other, b) in combinations(boxes, 2):
        assert not meet(a, b), (one, other)
    for shape in root.iter(f"{SVG}rect"):
        if shape.get("x"):
            assert 0 <= float(shape.get("x")) <= float(shape.get("x")) + float(shape.get("width")) <= WIDTH


@pytest.mark.parametrize("width", [20, 40, 60, 80, 133])
@pytest.mark.parametrize("name", CASES)
def test_every_line_of_characters_fits(name, width):
    lines = block_lines(block_picture(KVLayout.from_spec(CASES[name]).built), width)
    assert max(map(len, lines)) <= max(width, NARROWEST)


@pytest.mark.parametrize("name", CASES)
def test_it_tells_who_cannot_see_it(name):
    layout = KVLayout.from_spec(CASES[name])
    root = ET.fromstring(svg_of(CASES[name]))
    assert root.get("role") == "img"
    assert [child.tag for child in root][:2] == [f"{SVG}title", f"{SVG}desc"]
    assert layout.notation in root.find(f"{SVG}title").text
    assert f"{layout.block_nbytes:,} bytes" in root.find(f"{SVG}desc").text


@pytest.mark.parametrize("name", CASES)
def test_nothing_is_loaded_and_nothing_reaches_beyond_it(name):
    svg = svg_of(CASES[name])
    assert not re.findall(r"href|<script|@import|url\((?!#kvplan-)", svg)
    assert svg.count("http") == 1  # the namespace
    known = set(re.findall(r'<pattern id="([^"]+)"', svg))
    assert set(re.findall(r"url\(#([^)]+)\)", svg)) <= known
    rules = re.sub(r"@media\([^)]*\)\{", "", STYLE).split("}")
    assert all(rule.startswith(".kvplan-") for rule in rules if rule)


@pytest.mark.parametrize("name", PICTURES)
def test_pictures_of_the_documentation_are_what_is_drawn(name):
    assert (ROOT / "docs" / "pictures" / f"{name}.svg").read_text(encoding="utf-8") == svg_of(PICTURES[name])
