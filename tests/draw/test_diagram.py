"""The picture of a program: each stripe says what it holds, all runs are drawn or counted, and nothing is cut off."""

from __future__ import annotations

from itertools import product
from xml.etree import ElementTree as ET

import pytest

import kvplan
from kvplan import KVLayout
from kvplan.draw.stripes import MOST, Left, stripes_of
from tests.commands import GPU, HOST, SPECS, X_PACKED

SVG = "{http://www.w3.org/2000/svg}"
NOTATIONS = (
    "layer: kv block token head dim",
    "block layer kv token head dim",
    "block layer kv head token dim",
    "kv (block token) layer head dim",
    "layer: kv block head dim.0 token dim.1",
    "layer: block head token (kv dim)",
    "block: layer kv token head dim",
)


def layout_of(notation: str, *, layers: int = 20, tokens: int = 16, heads: int = 4) -> KVLayout:
    sizes = {"layer": layers, "kv": 2, "block": 64 // tokens, "token": tokens, "head": heads, "dim": 32, "dim.1": 8}
    held = {axis: size for axis, size in sizes.items() if axis in notation and axis != "kv"}
    return KVLayout.from_spec({"notation": notation, "dtype": "fp16", "sizes": held})


PAIRS = [(layout_of(a), layout_of(b, tokens=32)) for a, b in product(NOTATIONS, NOTATIONS)]


@pytest.mark.parametrize(("src", "dst"), PAIRS, ids=[f"{a.notation} to {b.notation}" for a, b in PAIRS])
def test_each_stripe_begins_where_both_layouts_have_what_it_names(src, dst):
    program = kvplan.compile(src, dst)
    shown = stripes_of(program.program, src, dst)
    assert 0 < len(shown.stripes) <= MOST
    assert len({one.src for one in shown.stripes}) == len(shown.stripes)
    for one in shown.stripes:
        layer, part, token, head, byte = (value.replace(" ", "-").partition("-")[0] for value in one.values)
        where = {"layer": int(layer), "part": part, "block": 0, "token": int(token or 0), "head": int(head or 0)}
        if one.values[2] and not one.values[4]:
            assert src.address(**where) == one.src
            assert dst.address(**where) == one.dst
        elif one.values[4] == "0-15":  # the first word of a row
            assert (src.address(**where), dst.address(**where)) == (one.src, one.dst)
        assert byte == "" or int(byte) % 16 == 0


@pytest.mark.parametrize(("src", "dst"), PAIRS, ids=[f"{a.notation} to {b.notation}" for a, b in PAIRS])
def test_all_runs_of_a_unit_are_drawn_or_counted(src, dst):
    program = kvplan.compile(src, dst)
    shown = stripes_of(program.program, src, dst)
    for side in shown.sides:
        items = [item for frame in side.items for item in frame]
        assert sorted(item for item in items if isinstance(item, int)) == list(range(len(shown.stripes)))
        left = [item for item in items if isinstance(item, Left)]
        assert len(shown.stripes) + sum(one.runs for one in left) == program.runs
        assert sum(one.nbytes for one in shown.stripes) + sum(one.nbytes for one in left) == program.unit_nbytes
        addresses = [shown.stripes[item][3 + shown.sides.index(side)] for item in items if isinstance(item, int)]
        assert addresses == sorted(addresses)


def texts(root):
    return [text.text for text in root.iter(f"{SVG}text")]


TOKEN_MAJOR = str(SPECS / "host_token_major.toml")


@pytest.mark.parametrize("pair", [(GPU, HOST), (X_PACKED, X_PACKED), (GPU, TOKEN_MAJOR)], ids=["block", "x", "token"])
def test_nothing_lies_outside_the_page(pair):
    src, dst = map(KVLayout.from_spec, pair)
    root = ET.fromstring(kvplan.compile(src, dst).diagram())
    width, height = map(float, root.get("viewBox").split()[2:])
    for box in root.iter(f"{SVG}rect"):
        assert 0 <= float(box.get("x", 0)) <= float(box.get("x", 0)) + float(box.get("width")) <= width
    for text in root.iter(f"{SVG}text"):
        room = float(text.get("x")) + len(text.text) * 6.9 * (0.5 if text.get("text-anchor") else 1)
        assert room <= width
        assert 0 < float(text.get("y")) <= height
        assert "…" not in text.text


def test_eighty_layers_are_folded_with_their_axes_named():
    """K and V of 80 layers, each layer an allocation, to a pool whose block is one run."""
    src, dst = map(KVLayout.from_spec, (GPU, HOST))
    root = ET.fromstring(kvplan.compile(src, dst).diagram())
    told = texts(root)
    assert "160 x 8,192 B a unit; drawn: 6; left out: 154; layers 0, 1, 79 of 80" in told
    assert "source: 160 x 8,192 B, apart, in 80 allocations" in told
    assert "destination: 1 x 1,310,720 B, contiguous, in 1 allocation" in told
    assert told.count("+154") == 2
    for axis in ("layer", "part", "token", "head"):
        assert told.count(axis) == 2
    assert told.count("79") == told.count("0-15") == told.count("0-1") == 2
    # Three allocations of the source are drawn, one of the destination; and one frame stands in the legend.
    assert sum(box.get("class") == "frame" for box in root.iter(f"{SVG}rect")) == 5
    fills = {box.get("fill") for box in root.iter(f"{SVG}rect") if box.get("class") == "run"}
    assert fills == {"url(#kvplan-part-0)", "url(#kvplan-part-1)"}
    said = [title.text for box in root.iter(f"{SVG}rect") for title in box.iter(f"{SVG}title")]
    assert any(one.startswith("layer 79, part v, token 0-15, head 0-1: 8,192 bytes from 0x") for one in said)
