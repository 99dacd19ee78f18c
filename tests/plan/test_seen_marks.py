"""Destinations named twice: found by marks, one a unit, that every call takes back; compiled and as written."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import kvplan
from kvplan import KVLayout
from kvplan.plan import placing_numba
from kvplan.plan.placement import _Scratch
from tests.profiles import examples

BLOCKS = 200  # marks of three words, so that those of one word are told from those of another


def first_again(ids: list[int], skip: int, units: int, count: int) -> int:
    """The first unit that is named twice, by a plain search; or -1."""
    numbers = [block * units + unit for block in ids for unit in range(units)][skip : skip + count]
    return next((number for at, number in enumerate(numbers) if number in numbers[:at]), -1)


@st.composite
def named(draw):
    units = draw(st.sampled_from((1, 2, 3)))
    near = st.integers(0, 5) | st.integers(60, 68) | st.integers(0, BLOCKS - 1)
    ids = draw(st.lists(near, min_size=1, max_size=8))
    skip = draw(st.integers(0, units - 1))
    count = draw(st.integers(max((len(ids) - 1) * units - skip + 1, 0), len(ids) * units - skip))
    return ids, skip, units, count


@examples(250)
@given(case=named())
@example(case=([63, 63], 0, 1, 2))
@example(case=([5, 5], 1, 2, 2))  # its second half, then its first
@example(case=([31, 31], 0, 2, 4))  # unit 62 and, were that not seen, 63
@example(case=([31, 31], 1, 2, 3))  # unit 63
@example(case=([64, 0, 64], 0, 1, 3))
@example(case=([0, 64, 0], 0, 1, 3))
@example(case=([5, 69, 133], 0, 1, 3))  # the same bit of three words
@example(case=([1, 0, 65, 64], 0, 1, 4))
def test_the_first_unit_named_twice_is_found_and_every_mark_is_taken_back(case):
    ids, skip, units, count = case
    seen = np.zeros(BLOCKS * units // 64 + 1, np.uint64)
    for twice in (placing_numba._twice, placing_numba._twice.py_func):
        assert twice(np.array(ids, np.int64), skip, units, count, seen) == first_again(*case)
        assert not seen.any()
    if units == 1:
        for twice in (placing_numba._twice_blocks, placing_numba._twice_blocks.py_func):
            assert twice(np.array(ids, np.int64), seen) == first_again(*case)
            assert not seen.any()


@pytest.mark.parametrize("size", [4, 8])
def test_a_refused_plan_leaves_no_mark_that_the_next_one_finds(size, monkeypatch):
    monkeypatch.setattr("kvplan.plan.placement._scratch", scratch := _Scratch())
    sides = [KVLayout.from_tensors("block token dim", np.zeros((BLOCKS, n, 1), np.uint8)) for n in (4, size)]
    program, units = kvplan.compile(*sides), size // 4
    for ids in ([70, 130, 5, 70], [199, 0, 199], [64, 63, 128, 63]):
        where = f"name block {ids[-1]} {'(unit 0 of it) ' * (units > 1)}more than once"
        with pytest.raises(kvplan.OverlapError, match=re.escape(where)):
            program.plan(range(len(ids) * units), ids)
        assert not scratch.words.any()
        assert program.plan(range(len(set(ids)) * units), list(dict.fromkeys(ids))).units == len(set(ids)) * units
        assert not scratch.words.any()


def test_marks_are_of_as_many_words_as_there_are_units_to_mark():
    scratch = _Scratch()
    small = scratch.of(64 * 64)
    assert small.size == 64
    assert scratch.of(1) is small
    assert scratch.of(64 * 64 + 1).size == 65
    assert scratch.of(65 * 64).size == 65
    assert not scratch.words.any()
