"""The loops of a recipe's columns, compiled and as they are written, against plain numpy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplan.plan.packing import column_loops
from kvplan.plan.packing.pack_recipe import SAMPLE
from tests.profiles import examples


def compiled(name: str):
    return getattr(column_loops, name)


def as_written(name: str):
    function = compiled(name).py_func

    def called(*given_):
        with np.errstate(over="ignore"):  # products wrap around
            return function(*given_)

    return called


both = pytest.mark.parametrize("loop", [compiled, as_written])
STEPS = st.one_of(st.integers(1, 1 << 20), st.sampled_from((1, 2, 576, 4096, 131072, 3 << 30, (1 << 31) - 1)))


@both
@examples(150)
@given(index=st.lists(st.integers(0, 1 << 20), min_size=1, max_size=90), step=STEPS, first=st.integers(0, 1 << 47),
       wider=st.sampled_from((1, 1, 2, 6)))  # fmt: skip
def test_addresses_are_divided_by_the_step_that_they_have(loop, index, step, first, wider):
    distances = np.array(index, np.int64) * (step * wider)
    low, high = map(int, loop("bounds_of")(first + distances))
    assert (low, high) == (first + distances.min(), first + distances.max())
    head = distances[:SAMPLE] - distances.min()
    common = int(loop("step_of")((first + distances)[:SAMPLE], low, step))
    assert common == (int(np.gcd.reduce(head)) or step)
    assert common % step == 0
    for tried in (common, step):
        found = (distances - distances.min()) // tried
        most = int(found.max())
        for dtype in [one for one in ("<u1", "<u2", "<u4", "<u8") if most <= np.iinfo(one).max]:
            out = np.empty(len(index), dtype)
            fine = bool(loop("divide")(first + distances, low, tried, most, out))
            assert fine == (not ((distances - distances.min()) % tried).any())
            assert not fine or out.tolist() == found.tolist()


@both
@examples(100)
@given(index=st.lists(st.integers(0, 300), min_size=1, max_size=20), step=STEPS, first=st.integers(0, 1 << 47),
       dtype=st.sampled_from(("<u2", "<u4", "<u8")))  # fmt: skip
def test_addresses_are_made_from_indices(loop, index, step, first, dtype):
    given_ = np.array(index, dtype)
    given_.flags.writeable = False  # as those of a message
    addresses = np.empty(len(index), np.int64)
    assert tuple(map(int, loop("addresses_of")(given_, first, step, addresses))) == (min(index), max(index))
    assert addresses.tolist() == [first + step * one for one in index]
