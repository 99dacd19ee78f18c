"""docs/evidence/architecture.md and its picture say what the import contract says."""

from __future__ import annotations

import re
import sys
import xml.etree.ElementTree as ET
from collections import defaultdict

import grimp

from docs.tools import picture

TEXT = (picture.ROOT / "docs" / "evidence" / "architecture.md").read_text(encoding="utf-8")


def test_the_picture_is_drawn_from_the_contract():
    assert picture.PICTURE.read_text(encoding="utf-8") == picture.drawn(), "run: python docs/tools/picture.py"
    assert ET.fromstring(picture.drawn()).tag.endswith("svg")


def test_the_picture_shows_every_room_and_exception():
    rooms, _, exceptions = picture.contract()
    shown = ET.fromstring(picture.drawn())
    boxes = {text.text: float(text.get("y")) for text in shown.iterfind(".//*[@class='room']")}
    assert list(boxes) == rooms
    assert sorted(boxes.values()) == list(boxes.values())
    assert len(shown.findall(".//*[@class='up']")) == len(exceptions)
    assert set(picture.STEPS.values()) <= set(rooms)


def test_the_table_has_every_room_in_order():
    rooms, _, exceptions = picture.contract()
    assert list(picture.table()) == rooms[::-1]
    assert exceptions == [("layout", "draw")]
    inside = {path.stem for path in (picture.ROOT / "kvplan").iterdir() if path.stem not in {"py", "version"}}
    assert {name for name in inside if not name.startswith("_")} == set(rooms)


def test_the_table_tells_the_packages_of_a_room():
    graph = grimp.build_graph("kvplan", cache_dir=None, include_external_packages=True)
    imported = defaultdict(set)
    for module in graph.modules:
        room = [*module.split("."), ""][1]
        imported[room] |= {
            name for name in graph.find_modules_directly_imported_by(module) if not name.startswith("kvplan")
        }
    rows = re.findall(r"^\| \[`([a-z]+)[^|]*\|[^|]*\| ([^|]*) \|$", TEXT, re.MULTILINE)
    for room, packages in rows:
        assert set(packages.split(", ")) - {"—"} == imported[room] - sys.stdlib_module_names - {"numpy"}, room
