"""How a copy kernel's rows are shaped, and how items are cut to them; and what an executor's arena rounds to."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvplan.execute.gpu.resources import MAX_WARPS, WORDS, cut, shape_of
from tests.profiles import examples

KIB = 1 << 10


@given(
    alignment=st.integers(1, 512),
    longest=st.integers(1, 1 << 21),
    tile=st.sampled_from([KIB << k for k in range(8)]),
    max_warps=st.sampled_from((1, 2, 4, 8, 16, 32)),
)
def test_every_shape_is_one_that_triton_takes_and_registers_hold(alignment, longest, tile, max_warps):
    shape = shape_of(alignment, longest, tile, max_warps)
    assert shape.word in WORDS
    assert alignment % shape.word == 0
    for number in (shape.width, shape.rows, shape.warps):
        assert number > 0
        assert number & (number - 1) == 0
    assert shape.width % shape.word == 0
    assert shape.warps <= min(max_warps, MAX_WARPS)
    assert shape.width * shape.rows <= tile
    assert shape.width * shape.rows <= 8 * shape.word * 32 * shape.warps or shape.width == 16  # words a thread


@examples(250)
@given(
    items=st.lists(st.tuples(st.integers(0, 999), st.integers(0, 999), st.integers(1, 5000)), max_size=6),
    longest=st.integers(1, 200).map(lambda k: 16 * k),
)
def test_pieces_cover_an_item_exactly_in_steps_of_words(items, longest):
    made = cut(np.array(items, np.int64).reshape(-1, 3).T, longest)
    left = made.T.tolist()
    for src, dst, nbytes in items:
        done = 0
        while done < nbytes:
            a, b, size = left.pop(0)
            assert (a, b) == (src + done, dst + done)
            assert 0 < size <= longest
            done += size
            assert size % 16 == 0 or done == nbytes
        assert done == nbytes
    assert not left
