"""A block as drawing data: bands by hand; and laws: no byte is drawn twice or lost, gaps are what is between."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplan import KVLayout
from kvplan.draw.block import Band, Fold, block_picture
from kvplan.draw.content import Gap
from kvplan.layout.strides import offset
from tests.commands import SPECS
from tests.profiles import examples

BASE = 0x1000


def spec(notation, sizes, **more):
    return KVLayout.from_spec({"notation": notation, "dtype": "uint8", "address": BASE, "sizes": sizes, **more})


def content_of(layout, block):
    """Addresses of every byte of a block, by the definition of a layout."""
    found = []
    for c in layout.components:
        inner = c.form
        starts = [0]
        for factors in (inner.token, inner.head, inner.dim):
            count = int(np.prod([n for n, _ in factors], initial=1))
            starts = [s + offset(factors, k) for s in starts for k in range(count)]
        found += [c.address + inner.block_offset(block) + s for s in starts]
    return sorted(found)


def runs_by_hand(addresses, layout):
    """Maximal runs of sorted addresses; allocations stay apart."""
    cuts = {region.address for region in layout.regions} | {region.end for region in layout.regions}
    runs = []
    for address in addresses:
        if runs and address == sum(runs[-1]) and address not in cuts:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((address, 1))
    return runs


def check_band(band):
    """What is inside a band is all of it, folded or not."""
    if not band.cells:
        assert band.solid
        assert band.runs == 1
        return
    bands = [cell for cell in band.cells if isinstance(cell, Band)]
    folds = [cell for cell in band.cells if isinstance(cell, Fold)]
    assert sum(cell.content for cell in (*bands, *folds)) == band.content
    assert len(bands) + sum(fold.count for fold in folds) == band.count
    if not folds and band.axis != "allocation":
        assert sum(cell.nbytes for cell in band.cells) == band.nbytes
    for cell in (*bands, *(fold.like for fold in folds)):
        check_band(cell)


def check_laws(layout, block=0):
    picture = block_picture(layout.built, block)
    runs = runs_by_hand(content_of(layout, block), layout)
    assert sorted(picture.each_run()) == runs
    assert (picture.runs, picture.run_nbytes) == (len(runs), (min(n for _, n in runs), max(n for _, n in runs)))
    assert sum(band.content for band in picture.stretches) == picture.content == layout.block_nbytes
    assert sum(band.runs for band in picture.stretches) == picture.runs
    for band in picture.stretches:
        check_band(band)
    return picture


# ---- by hand ---------------------------------------------------------------------------------------------------------


def test_planes_of_a_padded_page():
    # Rows of 4 bytes, 2 to a page of 12 (4 of them padding), 3 pages to a plane.
    layout = spec("kv block token dim", {"kv": 2, "block": 3, "token": 2, "dim": 4}, strides=[36, 12, 4, 1])
    (row, *inner) = check_laws(layout, 1).rows()
    k, pad, others, v, end = row.band.cells
    assert (k.name, k.nbytes, k.runs, k.axis, k.count, k.stride) == ("k", 8, 1, "token", 2, 4)
    assert (pad, pad.name) == (Gap(4, 4), "padding")
    # Page 2 of K, its padding, page 0 of V, its padding: 24 bytes, 8 of them nobody's.
    assert (others, others.name) == (Gap(24, 8), "other blocks")
    assert (v.name, end) == ("v", Gap(4, 4))
    assert [(zoom.path, zoom.others, zoom.parent) for zoom in inner] == [(("k",), ("v",), 0)]
    assert row.band.nbytes == 8 + 4 + 24 + 8 + 4


@pytest.mark.slow
def test_eighty_layers_are_folded():
    layout = spec("layer: kv block token head dim", {"layer": 80, "block": 4, "token": 16, "head": 2, "dim": 128})
    picture = check_laws(layout, 3)
    assert picture.headline == "block 3: 655,360 bytes in 160 runs of 4,096 bytes, in 80 allocations"
    (band,) = picture.stretches
    first, fold, last = band.cells
    assert (band.axis, band.count, first.name, last.name) == ("allocation", 80, "layer 0", "layer 79")
    assert (fold.count, fold.content, fold.same) == (78, 78 * 8192, True)
    assert [row.band.axis for row in picture.rows()] == ["allocation", "part", "token", "head"]


# ---- laws ------------------------------------------------------------------------------------------------------------

SIZES = {"layer": 5, "kv": 2, "block": 3, "token": 4, "head": 3, "dim": 4}
ORDERS = [*permutations(["layer", "kv", "block", "token", "head", "dim"])]


@examples(80)
@given(order=st.sampled_from(ORDERS), outside=st.integers(0, 2), block=st.integers(0, 2), data=st.data())
def test_runs_are_those_of_the_definition(order, outside, block, data):
    outside = outside if {*order[:outside]} <= {"layer", "kv"} else 0
    notation = f"{' '.join(order[:outside])}: {' '.join(order[outside:])}" if outside else " ".join(order)
    strides, stride = [], 1
    for axis in reversed(order[outside:]):
        strides.insert(0, stride)
        stride = stride * SIZES[axis] + data.draw(st.sampled_from([0, 0, 1, 5]), label=f"padding of {axis}")
    check_laws(spec(notation, SIZES, strides=strides), block)


@examples(60)
@given(order=st.sampled_from(ORDERS), pads=st.lists(st.sampled_from([0, 0, 3]), min_size=6, max_size=6),
       block=st.integers(0, 2))  # fmt: skip
def test_gaps_are_what_is_between(order, pads, block):
    """Of every gap that lies beside the first bands: its bytes, and how many of them no block owns."""
    strides, stride = [], 1
    for axis, pad in zip(reversed(order), pads, strict=True):
        strides.insert(0, stride)
        stride = stride * SIZES[axis] + pad
    layout = spec(" ".join(order), SIZES, strides=strides)
    owned = {address for k in range(layout.num_blocks) for address in content_of(layout, k)}
    mine = content_of(layout, block)
    own = {*mine}

    def walk(band, at):
        for cell in band.cells:
            if isinstance(cell, Fold):
                return  # what follows lies further on
            if isinstance(cell, Gap):
                between = range(at, at + cell.nbytes)
                assert own.isdisjoint(between)
                assert cell.padding == sum(address not in owned for address in between)
            else:
                assert {at, at + cell.nbytes - 1} <= own
                walk(cell, at)
            at += cell.nbytes

    (band,) = block_picture(layout.built, block).stretches
    walk(band, mine[0])


def test_the_picture_counts_what_inspect_counts():
    from kvplan.cli.answers.layout_facts import layout_facts

    for path in SPECS.iterdir():
        layout = KVLayout.from_spec(path)
        extents = layout_facts(layout)["block_extents"]
        picture = block_picture(layout.built)
        assert (picture.runs, *picture.run_nbytes) == tuple(extents.values()), path.name
