"""The reverse map is the inverse of the map: every byte of content, and every byte that is none."""

from __future__ import annotations

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from kvplan import locate
from kvplan.layout.places import Row
from kvplan.layout.strides import extent, offset
from tests.profiles import examples
from tests.strategies import cases, layout_of


def coordinates(layout):
    """Every byte of content by address, from layout.address and the content's own strides."""
    found = {}
    for component in layout.components:
        form = component.form
        for block, token, head in product(range(layout.num_blocks), range(extent(form.token)), form.heads):
            start = layout.address(layer=component.layer, part=component.part, block=block, token=token, head=head)
            for byte in range(extent(form.dim)):
                address = start + offset(form.dim, byte)
                assert address not in found
                found[address] = Row(component.layer, component.part, block, None if form.opaque else token,
                                     head if form.headed else None, byte,
                                     token if form.subblocks > 1 else None)  # fmt: skip
    return found


def rows_of(place):
    """Every coordinate that a place of content holds."""
    tokens, heads, subblocks = place.tokens or (None,), place.heads or (None,), place.subblocks or (None,)
    spans = [byte for first, end in place.bytes for byte in range(first, end)]
    layer, part = place.component.layer, place.component.part
    return [Row(layer, part, *where) for where in product(place.blocks, tokens, heads, spans, subblocks)]


@examples(60)
@given(case=cases(max_blocks=3), data=st.data())
def test_every_other_byte_is_padding_between_its_neighbours(case, data):
    cache = case.src.build(case.seed)
    layout = layout_of(cache)
    known = coordinates(layout)
    for region in layout.regions:
        inside = [address for address in known if region.address <= address < region.end]
        other = sorted(set(range(region.address, region.end)) - known.keys())
        for address in data.draw(st.lists(st.sampled_from(other), max_size=12)) if other else ():
            (place,) = locate(layout, address)
            below = max((a for a in inside if a < address), default=None)
            above = min((a for a in inside if a > address), default=None)
            assert (
                place.kind
                == {(1, 1): "padding", (1, 0): "after", (0, 1): "before"}[below is not None, above is not None]
            )
            assert place.after == known.get(below)
            assert place.before == known.get(above)
            assert below is None or place.after_nbytes == address - below - 1
            assert above is None or place.before_nbytes == above - address


@examples(60)
@given(case=cases(max_blocks=3), data=st.data())
def test_a_range_is_folded_without_loss(case, data):
    cache = case.src.build(case.seed)
    layout = layout_of(cache)
    known = coordinates(layout)
    region = data.draw(st.sampled_from(layout.regions))
    start = region.address + data.draw(st.integers(0, region.nbytes - 1))  # where it lies differs from run to run
    nbytes = data.draw(st.integers(1, region.end - start))
    places = locate(layout, start, nbytes)
    assert sum(place.nbytes for place in places) == nbytes
    assert [place.address for place in places] == sorted(place.address for place in places)
    held = [row for place in places if place.kind == "content" for row in rows_of(place)]
    asked = range(start, start + nbytes)
    assert sorted(held, key=str) == sorted((known[address] for address in asked if address in known), key=str)
    assert sum(place.nbytes for place in places if place.kind != "content") == nbytes - len(held)
    assert all(str(place) for place in places)
