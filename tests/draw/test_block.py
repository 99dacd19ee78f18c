"""The picture of a block: bands by hand; and laws: no byte is drawn twice or lost, gaps are what is between."""

from __future__ import annotations

from itertools import pairwise, permutations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvplan import KVLayout
from kvplan.draw.bands import OTHERS, PADDING
from kvplan.draw.block import block_picture
from kvplan.layout.strides import offset
from tests.profiles import examples

BASE = 0x1000


def spec(notation, sizes, **more):
    return KVLayout.from_spec({"notation": notation, "dtype": "uint8", "address": BASE, "sizes": sizes, **more})


def content_of(layout, block):
    """Addresses of every byte of a block, by the definition of a layout."""
    found = []
    for c in layout.components:
        starts = [0]
        for factors in (c.form.token, c.form.head, c.form.dim):
            count = int(np.prod([n for n, _ in factors], initial=1))
            starts = [s + offset(factors, k) for s in starts for k in range(count)]
        found += [c.address + c.form.block_offset(block) + s for s in starts]
    return sorted(found)


def runs_by_hand(addresses):
    """Bytes of the maximal runs of sorted addresses."""
    cuts = [0, *(k for k in range(1, len(addresses)) if addresses[k] != addresses[k - 1] + 1), len(addresses)]
    return [b - a for a, b in pairwise(cuts)]


def top(layout, block=0):
    """The first row of a block in one allocation, whose headline is right."""
    picture = block_picture(layout.built, block)
    runs = runs_by_hand(content_of(layout, block))
    sizes = f"{min(runs):,}" if min(runs) == max(runs) else f"{min(runs):,}-{max(runs):,}"
    many = f"{len(runs):,} runs of {sizes} bytes"
    assert f" in {'one contiguous run' if len(runs) == 1 else many}" in picture.heading[1]
    row = picture.rows[0]
    assert row.caption[2] in ("one run" if len(runs) == 1 else f"{len(runs):,} runs", "one run")
    assert sum(cell.content for cell in row.cells) == layout.block_nbytes
    return picture.rows


# ---- by hand ---------------------------------------------------------------------------------------------------------


def test_planes_of_a_padded_page():
    # Rows of 4 bytes, 2 to a page of 12 (4 of them padding), 3 pages to a plane.
    layout = spec("kv block token dim", {"kv": 2, "block": 3, "token": 2, "dim": 4}, strides=[36, 12, 4, 1])
    row, inner = top(layout, 1)
    # Page 2 of K, its padding, page 0 of V, its padding: 24 bytes.
    assert [(cell.name, cell.nbytes) for cell in row.cells] == [
        ("k", 8), (PADDING, 4), (OTHERS, 24), ("v", 8), (PADDING, 4),
    ]  # fmt: skip
    assert inner.caption == ("token x 2", ", 4 bytes each, no gaps, in k (v alike)", "one run")


# ---- laws ------------------------------------------------------------------------------------------------------------

SIZES = {"layer": 5, "kv": 2, "block": 3, "token": 4, "head": 3, "dim": 4}
ORDERS = [*permutations(["layer", "kv", "block", "token", "head", "dim"])]


@examples(80)
@given(order=st.sampled_from(ORDERS), pads=st.lists(st.sampled_from([0, 0, 3]), min_size=6, max_size=6),
       block=st.integers(0, 2))  # fmt: skip
def test_all_content_is_drawn_and_gaps_are_what_is_between(order, pads, block):
    strides, stride = [], 1
    for axis, pad in zip(reversed(order), pads, strict=True):
        strides.insert(0, stride)
        stride = stride * SIZES[axis] + pad
    layout = spec(" ".join(order), SIZES, strides=strides)
    owned = {address for k in range(layout.num_blocks) for address in content_of(layout, k)}
    mine = content_of(layout, block)

    def walk(cells, at):
        for cell in cells:
            if cell.pale:
                return  # what follows lies further on
            held = range(at, at + cell.nbytes)
            if cell.fill == PADDING:
                assert not owned.intersection(held)
            elif cell.fill == OTHERS:
                assert at in owned
                assert not set(mine).intersection(held)
            else:
                assert {at, at + cell.nbytes - 1} <= set(mine)
                assert cell.content == len(set(mine).intersection(held))
                assert cell.runs == len(runs_by_hand(sorted(set(mine).intersection(held))))
                walk(cell.cells, at)
            at += cell.nbytes

    walk(top(layout, block)[0].cells, mine[0])
