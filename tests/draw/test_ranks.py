"""The picture of a resharding: well-formed, every copy in it, ranks named and told apart."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from hypothesis import given

import kvplan
from kvplan.draw.ranks import PALETTE
from tests.profiles import examples
from tests.ranks.rank_specs import HND, NHD, SPLIT, tp
from tests.ranks.topologies import reshards, shards_of

PICTURES = Path(__file__).parents[2] / "docs" / "pictures"
SVG = "{http://www.w3.org/2000/svg}"


def texts(root) -> list[str]:
    return [element.text for element in root.iter(f"{SVG}text")]


def coloured(root) -> list[tuple[str, float, float]]:
    """Colour, left edge and width of every band of the destination."""
    rects = [e for e in root.iter(f"{SVG}rect") if "#kvplan-0" in e.get("fill", "")]
    bottom = max(float(e.get("y")) for e in rects)
    return [(f"#{e.get('fill')[-7:-1]}", float(e.get("x")), float(e.get("width"))) for e in rects
            if float(e.get("y")) == bottom]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "src", "dst"),
    [("tp4-to-tp2-nhd", SPLIT, NHD), ("tp4-to-tp2-hnd", "layer: kv block head token dim", HND)],
)
def test_pictures_of_the_documentation_are_what_is_drawn(name, src, dst):
    sides = (tp(notation, count, 8, layers=range(2), blocks=1024) for notation, count in ((src, 4), (dst, 2)))
    assert (PICTURES / f"{name}.svg").read_text(encoding="utf-8") == kvplan.reshard(*sides).diagram()


@examples(60)
@given(case=reshards())
def test_any_resharding_can_be_drawn(case):
    shards = shards_of(case)
    programs = kvplan.reshard(*shards)
    root = ET.fromstring(programs.diagram())
    assert {f"rank {k}" for side in shards for k in range(len(side))} <= set(texts(root))
    width = float(root.get("viewBox").split()[2])
    for colour, left, size in coloured(root):
        assert colour in PALETTE
        assert 0 <= left <= left + size <= width
