"""Overlap against brute force; what does not nest ends within a budget; large caches are proven apart in few steps."""

from __future__ import annotations

import random
from contextlib import nullcontext
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplan import KVLayout, LayoutError
from kvplan.layout.components import Component, Form
from kvplan.layout.disjoint import check_disjoint, nests
from tests.profiles import examples

FACTORS = st.lists(st.tuples(st.integers(1, 5), st.integers(0, 40)), max_size=5).map(tuple)


def offsets(factors) -> list[int]:
    digits = product(*(range(count) for count, _ in factors))
    return [sum(d * stride for d, (_, stride) in zip(digit, factors, strict=True)) for digit in digits]


def overlap(*sets) -> bool:
    """Whether sets of bytes overlap, each of a first byte and factors."""
    components = [
        Component(k, "k", first, Form(block=factors, token=(), head=(), dim=()))
        for k, (first, factors) in enumerate(sets)
    ]
    try:
        check_disjoint(components)
    except LayoutError as error:
        if "share bytes" not in str(error):
            raise
        return True
    return False


@examples(250)
@given(factors=FACTORS)
def test_a_set_overlaps_itself_where_two_coordinates_share_an_offset(factors):
    every = offsets(factors)
    apart = len(set(every)) == len(every)
    assert overlap((0, factors)) != apart
    assert apart or not nests(factors)


@examples(250)
@given(a=FACTORS, b=FACTORS, distance=st.integers(-200, 200))
def test_sets_overlap_where_they_share_a_byte(a, b, distance):
    every = [*offsets(a), *(distance + at for at in offsets(b))]
    assert overlap((0, a), (distance, b)) == (len(set(every)) < len(every))


@pytest.mark.slow
@pytest.mark.parametrize("count", [18, 24, 40])
def test_strides_of_like_size_end_in_an_error_within_the_budget(count):
    dice = random.Random(1)
    factors = tuple((2, dice.randrange(2**40, 2**41)) for _ in range(count))
    with pytest.raises(LayoutError, match=r"axes interleave .* after 2,097,152 steps; give strides that nest"):
        overlap((0, factors))


@pytest.mark.parametrize(("second", "meets"), [(7, True), (8, False)])
def test_parts_that_share_one_byte_overlap(second, meets):
    memory = np.zeros(12, np.uint8)
    parts = [memory[:8].reshape(1, 8), memory[second : second + 4].reshape(1, 4)]
    layouts = [KVLayout.from_tensors("block dim", part, part=name) for part, name in zip(parts, "ab", strict=True)]
    with pytest.raises(LayoutError, match="they share bytes") if meets else nullcontext():
        KVLayout.merge(layouts)
