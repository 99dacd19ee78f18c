"""What of a layout's memory is no content, counted by hand and by marking every byte."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given

from kvplan import KVLayout
from kvplan.layout.address_ranges import Padding, padding_of
from tests.profiles import examples
from tests.strategies import cases, layout_of


def test_memory_before_between_and_after_content():
    memory = np.zeros(20 + 3 * 80 + 5, np.uint8)
    pages = memory[20:-5].reshape(3, 80)[:, :64]
    assert padding_of(KVLayout.from_tensors("block dim", pages).built) == Padding(73, 32, 20, 21, 0, 265, 16)


@pytest.mark.parametrize(
    ("notation", "shape", "held", "wasted"),
    [
        # K and V planes of 5 padded blocks each: 2 * (48 - 32) bytes a block.
        ("kv block token dim", (2, 5, 4, 12), (slice(None), slice(None), slice(None), slice(8)), 32),
        # One page holds K, V and 16 bytes of neither.
        ("block kv token dim", (5, 3, 4, 4), (slice(None), slice(2)), 16),
        # Token rows of 3 layers, of 16 bytes each in 20.
        ("(block token) layer dim", (8, 3, 20), (..., slice(16)), 4 * 3 * 4),
        # Blocks inside tokens: no stride tells what a block takes.
        ("token block dim", (4, 5, 12), (..., slice(8)), None),
    ],
)
def test_what_a_block_wastes(notation, shape, held, wasted):
    whole = np.zeros(shape, np.uint8)
    sizes = {"token": 4} if "(block" in notation else {}
    found = padding_of(KVLayout.from_tensors(notation, whole[held], sizes=sizes).built)
    assert found.block_nbytes == wasted
    assert found.nbytes == whole.nbytes - whole[held].nbytes


@examples(60)
@given(case=cases())
def test_it_is_every_byte_that_is_no_content(case):
    for side in (case.src, case.dst):
        cache = side.build(case.seed)
        layout = layout_of(cache)
        found = padding_of(layout.built)
        assert found.nbytes == found.between_nbytes + found.before_nbytes + found.after_nbytes
        assert found.memory_nbytes == found.nbytes + layout.nbytes
        assert found.memory_nbytes + found.unused_nbytes == sum(root.nbytes for root in cache.roots)
