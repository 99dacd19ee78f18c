"""The reverse map is the inverse of the map: every byte of content, and every byte that is none."""

from __future__ import annotations

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from kvplan import KVLayout, locate
from kvplan.layout.inverse import Row
from kvplan.layout.strides import extent, offset
from tests.profiles import examples
from tests.strategies import cases, layout_of
from tests.unknown import GPU, mla_656, padded_split_kv


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
def test_every_coordinate_is_found_at_its_address(case, data):
    cache = case.src.build(case.seed)
    layout = layout_of(cache)
    known = coordinates(layout)
    for address in data.draw(st.lists(st.sampled_from(sorted(known)), min_size=1, max_size=40)):
        (place,) = locate(layout, address)
        assert (place.kind, place.address, place.nbytes, place.row) == ("content", address, 1, known[address])
        region = layout.regions[place.region]
        assert region.address + place.offset == address < region.end


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


def words(layout, address, nbytes=1):
    return [str(place) for place in locate(layout, address, nbytes)]


def test_a_split_cache_with_padded_pages():
    layout = padded_split_kv()
    assert words(layout, GPU + 80 + 16 + 8 + 3) == ["layer 0 k, block 1, token 1 (of 4), head 1 (of 2), byte 3 (of 8)"]
    assert words(layout, GPU + 256, 64) == ["layer 0 v, block 0, all 4 tokens, all 2 heads, all 8 bytes"]
    assert words(layout, GPU + 80 + 16, 32) == ["layer 0 k, block 1, tokens 1-2 (of 4), all 2 heads, all 8 bytes"]
    assert words(layout, GPU + 64 + 4) == [
        "1 byte of padding, 4 bytes after block 0 of layer 0 k, 12 bytes before block 1"
    ]
    assert words(layout, GPU + 3 * 80 - 16, 32) == [
        "32 bytes of padding, right after block 2 of layer 0 k, 32 bytes before block 0 of layer 0 v"
    ]
    assert words(layout, GPU, 160) == [
        "layer 0 k, blocks 0-1, all 4 tokens, all 2 heads, all 8 bytes",
        "32 bytes of padding in 2 gaps, the first right after block 0 of layer 0 k, 16 bytes before block 1",
    ]


def test_rows_of_656_bytes():
    layout = mla_656()
    assert words(layout, GPU + 2816 + 704 + 512, 16) == ["layer 0 kv, block 1, token 1 (of 4), bytes 512-527 (of 656)"]
    assert words(layout, GPU + 656, 48) == [
        "48 bytes of padding, right after token 0 of block 0 of layer 0 kv, 48 bytes before token 1"
    ]
    assert words(layout, GPU + 3 * 704 + 700) == [
        "1 byte of padding, 44 bytes after block 0 of layer 0 kv, 4 bytes before block 1"
    ]
    region = layout.regions[0]
    assert words(layout, region.end, 2) == ["2 bytes outside all regions; the nearest, region 0, ends right before"]
    assert words(layout, GPU - 100, 2) == ["2 bytes outside all regions; the nearest, region 0, begins 98 bytes after"]
    assert words(layout, layout.regions[1].address - 1) == [
        "1 byte outside all regions; the nearest, region 1, begins right after"
    ]
    assert words(layout, region.end - 1, 2) == [
        "layer 0 kv, block 3, token 3 (of 4), byte 655 (of 656)",
        "1 byte outside all regions; the nearest, region 0, ends right before",
    ]


def test_a_gap_within_a_row_and_between_heads():
    spec = {"notation": "block token head dim.0 dim.1", "dtype": "uint8", "address": 0,
            "sizes": {"block": 2, "token": 2, "head": 2, "dim": 8, "dim.1": 4},
            "strides": [100, 50, 20, 8, 1]}  # fmt: skip
    layout = KVLayout.from_spec(spec)
    assert words(layout, 5) == [
        (
            "1 byte of padding, 1 byte after token 0, head 0, byte 3 of block 0 of layer 0 kv, "
            "3 bytes before token 0, head 0, byte 4"
        )
    ]
    assert words(layout, 12, 8) == [
        "8 bytes of padding, right after token 0, head 0 of block 0 of layer 0 kv, 8 bytes before token 0, head 1"
    ]
    assert words(layout, 0, 12) == [
        "layer 0 kv, block 0, token 0 (of 2), head 0 (of 2), all 8 bytes",
        (
            "4 bytes of padding, right after token 0, head 0, byte 3 of block 0 of layer 0 kv, 4 bytes before token 0, "
            "head 0, byte 4"
        ),
    ]


def test_blocks_that_are_looked_up_and_heads_of_a_rank():
    spec = {"notation": "block: token head dim", "dtype": "uint8", "head_start": 4,
            "sizes": {"block": 3, "token": 2, "head": 2, "dim": 8}}  # fmt: skip
    layout = KVLayout.from_spec(spec)
    address = layout.address(layer=0, part="kv", block=2, token=1, head=5)
    assert words(layout, address, 2) == ["layer 0 kv, block 2, token 1 (of 2), head 5 (of 4-5), bytes 0-1 (of 8)"]
    assert locate(layout, address)[0].region == 2


def test_a_region_of_which_a_slice_holds_nothing():
    layout = padded_split_kv().slice(layers=[0])
    assert words(layout, padded_split_kv().address(layer=1, part="k")) == [
        "1 byte of region 1, which holds nothing of this layout"
    ]
    only_v = padded_split_kv().slice(layers=[0], parts=["v"])
    assert words(only_v, GPU) == ["1 byte before all content of region 0, 256 bytes before block 0 of layer 0 v"]
