"""The SVG of a block: it parses, its labels lie on the page and apart, and it says all that it folds."""

from __future__ import annotations

import re
from itertools import combinations
from xml.etree import ElementTree as ET

import pytest

from kvplan import KVLayout
from kvplan.draw.block import block_picture
from kvplan.draw.notebook import layout_facts, text_html
from kvplan.draw.page import table
from kvplan.draw.svg import MARGIN, STYLE, WIDTH, svg
from tests import unknown
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


# ---- notebooks -------------------------------------------------------------------------------------------------------


def facts_of(layout):
    rows = ET.fromstring(layout._repr_html_()).iter("tr")
    return {row.find("th").text: row.find("td").text for row in rows}


def test_a_notebook_says_what_inspect_says():
    layout = unknown.padded_split_kv()
    assert facts_of(layout) == layout_facts(layout) == {
        "layout": "layer: kv block token head dim", "content": "uint8 on cuda:0, made-up addresses",
        "layers": "2 (0-1)", "parts": "k, v", "heads": "2 (0-1)", "blocks": "3 of 4 tokens",
        "a token": "64 bytes", "a block": "256 bytes", "all blocks": "768 bytes",
        "padding": "192 bytes, 20 %\nbetween 192 bytes, block 64 bytes",
        "contiguous": "a block is 4 extents of 64 bytes", "regions": "2 x 480 bytes", "seams": "none",
    }  # fmt: skip
    attention, state = map(facts_of, unknown.overlaid())
    assert (attention["layers"], attention["heads"]) == ("2 (0, 2)", "no axis of heads")
    assert (state["a token"], state["padding"]) == (
        "none: blocks move whole",
        "336 bytes, 21.9 %\nbetween 280 bytes, after 56 bytes, block 56 bytes",
    )
    # A part whose blocks move whole is of no one token: 16 bytes of each are the latent's.
    index = {"notation": "block dim", "part": "index", "sizes": {"block": 2, "dim": 100}, "address": 1 << 20}
    latent = {"notation": "block token dim", "dtype": "uint8", "sizes": {"block": 2, "token": 4, "dim": 16}}
    assert facts_of(KVLayout.from_spec({"layouts": [latent, index]}))["a token"] == (
        "16 bytes, without index: its blocks move whole"
    )


def test_names_are_escaped():
    assert "<td>&lt;b&gt;&amp;</td>" in table([("parts", "<b>&")])
    assert "<pre>&lt;b&gt;&amp;</pre>" in text_html("<b>&", "")
