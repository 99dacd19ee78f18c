"""Parse and print are inverse to each other."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplan.layout.notation import parse
from tests.strategies import form_of, logical_of

PUBLISHED = [
    "layer: kv block token head dim",
    "layer: block kv token head dim",
    "block layer kv token head dim",
    "kv layer: (block token) head dim",
    "layer: block head token (kv dim)",
    "layer: block token dim",
    "layer: kv block head dim.0 token dim.1",
    "block: layer kv token head dim",
    "layer: block 1 token dim",
    "layer: (block token) 1 dim",
    "block head.0 layer kv token head.1 dim",
    "block kv token (head dim)",
]


@pytest.mark.parametrize("text", PUBLISHED)
def test_published_notations_print_as_they_are_written(text):
    assert str(parse(text)) == text


@given(data=st.data())
def test_print_then_parse_is_the_identity(data):
    form = form_of(data.draw, logical_of(data.draw), 4, 3, range(2))
    parsed = parse(form.notation)
    assert parse(str(parsed)) == parsed


def test_white_space_and_needless_parentheses_do_not_matter():
    assert parse(" layer :(block)  ( token head )dim ") == parse("layer: block (token head) dim")
