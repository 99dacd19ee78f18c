"""The pages about GPUs say what the policy says, and their picture is drawn from it."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import pytest

from docs.tools import agents_picture, packed_picture, routes_picture
from kvplan.base.numbers import rounded
from kvplan.cost.policy import BESIDE_KERNELS, IDLE_KERNELS, ROUTES, KernelSize
from tests.commands import ROOT

SVG = "{http://www.w3.org/2000/svg}"


def told(size: KernelSize) -> str:
    programs = f"{size.programs}" if size.programs > 0 else f"{max(-size.programs, 1)} per SM"
    return f"{programs}, {rounded(size.tile)}, {size.warps}"


def test_the_table_of_kernel_sizes_is_the_policy_s():
    rows = ["| route | without compute | beside compute |", "| --- | --- | --- |"]
    rows += [f"| {route} | {told(IDLE_KERNELS[route])} | {told(BESIDE_KERNELS[route])} |" for route in ROUTES]
    text = (ROOT / "docs" / "guides" / "gpu.md").read_text(encoding="utf-8")
    shown = re.search(r"<!-- kernel sizes -->\n(.*?)\n<!-- end of kernel sizes -->", text, re.DOTALL)
    assert shown[1].splitlines() == rows


def test_the_picture_of_the_routes_is_drawn_from_the_policy():
    drawn = routes_picture.drawn()
    assert routes_picture.PICTURE.read_text(encoding="utf-8") == drawn, "run: python docs/tools/routes_picture.py"
    texts = [text.text for text in ET.fromstring(drawn).iter(f"{SVG}text")]
    assert f"{IDLE_KERNELS['pull'].programs} programs for the speed of the link" in texts
    assert [texts.count(f'Executor("cuda:{gpu}")') for gpu in (0, 1)] == [1, 1]


def test_the_picture_of_agents_is_drawn_anew():
    drawn = agents_picture.drawn()
    assert agents_picture.PICTURE.read_text(encoding="utf-8") == drawn, "run: python docs/tools/agents_picture.py"


def test_the_picture_of_a_packed_transfer_is_drawn_anew():
    drawn = packed_picture.drawn()
    assert packed_picture.PICTURE.read_text(encoding="utf-8") == drawn, "run: python -m docs.tools.packed_picture"


@pytest.mark.parametrize(
    "picture", [routes_picture, agents_picture, packed_picture], ids=["routes", "agents", "packed"]
)
def test_the_picture_stays_on_its_page(picture):
    shown = ET.fromstring(picture.drawn())
    _, _, width, height = map(float, shown.get("viewBox").split())
    for text in shown.iter(f"{SVG}text"):
        words, x = "".join(text.itertext()), float(text.get("x"))
        room = len(words) * (6.2 if text.get("class") == "small" else 7.2)
        left = x - {"start": 0, "middle": room / 2, "end": room}[text.get("text-anchor", "start")]
        assert left >= 0, words
        assert left + room <= width, words
    for box in shown.iter(f"{SVG}rect"):
        assert float(box.get("y", 0)) + float(box.get("height")) <= height
