"""What a notebook shows of programs, plans and reshardings: well-formed, escaped, and true."""

from __future__ import annotations

from xml.etree import ElementTree as ET

import numpy as np

import kvplan
from kvplan import KVLayout
from tests.commands import GPU, HOST
from tests.ranks.rank_specs import NHD, SPLIT, tp


def facts(shown):
    """The table of a notebook's view, which is well-formed XML."""
    root = ET.fromstring(shown)
    assert root.get("class") == "kvplan"
    rows = {row[0].text: row[1].text for row in root.iter("tr")}
    return rows, root.find("{http://www.w3.org/2000/svg}svg")


def test_a_program():
    rows, picture = facts(kvplan.compile(KVLayout.from_spec(GPU), KVLayout.from_spec(HOST))._repr_html_())
    assert rows["runs"] == "160 runs of 8,192 bytes a unit"
    assert rows["extents"] == "1 extent of 1,310,720 bytes in the destination"
    assert rows["unit"] == "16 tokens, 1,310,720 bytes (1.25 MiB)"
    assert rows["direction"] == "store"
    assert picture is not None


def test_a_plan_and_a_joined_plan():
    src, dst = (KVLayout.from_tensors("block token dim", np.zeros((8, 16, 64), np.int8)) for _ in range(2))
    plan = kvplan.compile(src, dst).plan([3, 4, 6], [0, 1, 2])
    rows, picture = facts(plan._repr_html_())
    assert rows["moves"] == "3 units, 3,072 bytes (3 KiB)"
    assert rows["runs"] == "3, before those that touch are merged"
    assert rows["from"] == str(src)
    assert picture is None
    rows, _ = facts(kvplan.join([plan, kvplan.compile(src, dst).plan([0], [5])])._repr_html_())
    assert rows["moves"] == "4 units, 4,096 bytes (4 KiB)"


def test_a_resharding():
    programs = kvplan.reshard(tp(SPLIT, 4, 8), tp(NHD, 2, 8))
    rows, picture = facts(programs._repr_html_())
    assert rows["ranks"] == "4 sources to 2 destinations"
    assert rows["3 to 1"].startswith("layers 0-1, k v, heads 6-7: ") or "heads 6-7" in rows["3 to 1"]
    assert rows["3 to 1"].endswith(" a unit")
    assert picture is not None
    many, _ = facts(kvplan.reshard(tp(SPLIT, 1, 32), tp(NHD, 32, 32))._repr_html_())
    assert many["..."] == "16 more pairs"
