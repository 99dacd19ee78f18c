"""What a notebook shows of programs and reshardings: well-formed and escaped."""

from __future__ import annotations

from xml.etree import ElementTree as ET

import kvplan
from kvplan import KVLayout
from tests.commands import GPU, HOST
from tests.ranks.rank_specs import NHD, SPLIT, tp


def shown(html):
    """The text of a notebook's view, which is well-formed XML, and its picture."""
    root = ET.fromstring(html)
    assert root.get("class") == "kvplan"
    return root.find("pre").text, root.find("{http://www.w3.org/2000/svg}svg")


def test_a_program():
    program = kvplan.compile(KVLayout.from_spec(GPU), KVLayout.from_spec(HOST))
    text, picture = shown(program._repr_html_())
    assert text == program.explain()
    assert picture is not None


def test_a_resharding():
    programs = kvplan.reshard(tp(SPLIT, 4, 8), tp(NHD, 2, 8))
    text, picture = shown(programs._repr_html_())
    assert text == str(programs)
    assert picture is not None
