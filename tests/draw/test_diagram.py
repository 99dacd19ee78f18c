"""The picture of a program: each run says what it holds, all runs are drawn or counted, and nothing is cut off."""

from __future__ import annotations

import re
from itertools import product
from xml.etree import ElementTree as ET

import pytest

import kvplan
from kvplan import KVLayout
from kvplan.draw.bands import LEFT_OUT
from kvplan.draw.copies import MOST, program_picture
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
    "layer head: kv block token dim",
)
TITLE = re.compile(r"layer (\d+).*, part (\w+).*?(?:, token (\d+).*?)?(?:, head (\d+).*?)?(?:, byte (\d+)-\d+)?: "
                   r"([\d,]+) bytes from (0x\w+) to (0x\w+)")  # fmt: skip


def layout_of(notation: str, *, layers: int = 20, tokens: int = 16, heads: int = 4) -> KVLayout:
    sizes = {"layer": layers, "kv": 2, "block": 64 // tokens, "token": tokens, "head": heads, "dim": 32, "dim.1": 8}
    held = {axis: size for axis, size in sizes.items() if axis in notation and axis != "kv"}
    return KVLayout.from_spec({"notation": notation, "dtype": "fp16", "sizes": held})


PAIRS = [(layout_of(a), layout_of(b, tokens=32)) for a, b in product(NOTATIONS, NOTATIONS)]


@pytest.mark.parametrize(("src", "dst"), PAIRS, ids=[f"{a.notation} to {b.notation}" for a, b in PAIRS])
def test_runs_lie_where_they_are_named_and_all_are_drawn_or_counted(src, dst):
    program = kvplan.compile(src, dst)
    picture = program_picture(program.program, src, dst, "")
    for row, layout, side in zip(picture.rows, (src, dst), (7, 8), strict=True):
        drawn = [TITLE.match(cell.title) for cell in row.cells if cell.title and not cell.pale]
        left_out = [cell for cell in row.cells if cell.fill == LEFT_OUT]
        assert 0 < len(drawn) == len(picture.rows[0].ribbons) <= MOST
        assert len(drawn) + sum(int(cell.name.replace(",", "")) for cell in left_out) == program.runs
        assert sum(cell.content for cell in row.cells) == program.unit_nbytes
        addresses = [int(found[side], 16) for found in drawn]
        assert addresses == sorted(set(addresses))
        for found, address in zip(drawn, addresses, strict=True):
            layer, part, token, head, byte = found.groups()[:5]
            if layout.notation.count("kv dim") == 0 and int(byte or 0) < 16:
                first = layout.address(layer=int(layer), part=part, token=int(token or 0), head=int(head or 0))
                assert first == address


@pytest.mark.parametrize("pair", [(GPU, HOST), (X_PACKED, X_PACKED), (GPU, str(SPECS / "host_token_major.toml"))],
                         ids=["block", "x", "token"])  # fmt: skip
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
