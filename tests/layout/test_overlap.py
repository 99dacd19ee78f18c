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
from kvplan.base.limits import Budget
from kvplan.layout.components import Component, Form
from kvplan.layout.disjoint import check_disjoint, injective, meets, nests
from tests.profiles import examples

FACTORS = st.lists(st.tuples(st.integers(1, 5), st.integers(0, 40)), max_size=5).map(tuple)


def offsets(factors) -> list[int]:
    digits = product(*(range(count) for count, _ in factors))
    return [sum(d * stride for d, (_, stride) in zip(digit, factors, strict=True)) for digit in digits]


class Counted(Budget):
    """A budget that tells what was taken of it."""

    taken = 0

    def use(self, kind: str, count: int) -> None:
        self.taken += count
        super().use(kind, count)


@examples(250)
@given(factors=FACTORS)
def test_factors_are_injective_where_no_two_coordinates_share_an_offset(factors):
    every = offsets(factors)
    apart = len(set(every)) == len(every)
    assert injective(factors) == apart
    assert apart or not nests(factors)


@examples(250)
@given(a=FACTORS, b=FACTORS, distance=st.integers(-200, 200))
def test_sets_meet_where_they_share_a_byte(a, b, distance):
    assert meets(a, b, distance) == bool(set(offsets(a)) & {distance + at for at in offsets(b)})


@pytest.mark.slow
@pytest.mark.parametrize("count", [18, 24, 40])
def test_strides_of_like_size_end_in_an_error_within_the_budget(count):
    dice = random.Random(1)
    factors = tuple((2, dice.randrange(2**40, 2**41)) for _ in range(count))
    budget = Counted()
    with pytest.raises(LayoutError, match=r"axes interleave .* after 2,097,152 steps; give strides that nest"):
        injective(factors, budget)
    assert budget.taken <= (1 << 21) + 8


def test_two_axes_of_millions_that_interleave_are_told_by_division():
    budget = Counted()
    assert injective(((10**9, 3), (2, 2), (10**6, 10**10)), budget)
    assert not injective(((10**9, 3), (4, 2), (10**6, 10**10)), budget)
    assert injective(((10**6, 7), (5, 10**9), (2, 3)), budget)
    assert budget.taken < 10_000


def test_axes_of_one_spacing_are_one_axis():
    assert injective(tuple((2, 1 << k) for k in range(60)), Counted())
    budget = Counted()
    assert not meets(tuple((2, 1 << k) for k in range(60)), ((1, 1),), 1 << 60, budget)
    assert budget.taken <= 16


def test_thousands_of_components_in_one_block_are_apart_in_few_steps():
    big, small = (Form(((1 << 20, 1 << 30),), ((16, 1 << 20),), (), ((size, 1),)) for size in (48, 16))
    components = [Component(layer, part, (layer * 64) + at, form) for layer in range(4096)
                  for part, at, form in (("k", 0, big), ("k_scale", 48, small))]  # fmt: skip
    budget = Counted()
    check_disjoint(components, budget)
    assert budget.taken < 20_000
    with pytest.raises(LayoutError, match="layer 7 'k' and layer 9 'v' overlap"):
        check_disjoint([*components, Component(9, "v", 7 * 64 + 40, Form(((1, 1),), (), (), ((8, 1),)))])


@pytest.mark.slow
def test_pairs_without_end_are_an_error():
    forms = [Form(((2, 1 << 40),), (), (), ((2, 1 << k),)) for k in (20, 21)]
    components = [Component(k, "kv", k, forms[k % 2]) for k in range(4000)]
    with pytest.raises(LayoutError, match="axes interleave"):
        check_disjoint(components)


def test_blocks_in_separate_allocations_share_one_look_at_the_regions():
    blocks = [np.zeros((40, 2, 4, 8), np.uint8) for _ in range(300)]
    layout = KVLayout.from_tensors("block: layer kv token dim", blocks)
    assert layout.num_blocks == 300
    assert layout.address(layer=39, part="v", block=299) == blocks[299][39, 1].ctypes.data
    table = layout.components[0].form.table
    assert all(component.form.table is table for component in layout.components)


@pytest.mark.parametrize(("second", "meets"), [(7, True), (8, False)])
def test_parts_that_share_one_byte_overlap(second, meets):
    memory = np.zeros(12, np.uint8)
    parts = [memory[:8].reshape(1, 8), memory[second : second + 4].reshape(1, 4)]
    layouts = [KVLayout.from_tensors("block dim", part, part=name) for part, name in zip(parts, "ab", strict=True)]
    with pytest.raises(LayoutError, match="they share bytes") if meets else nullcontext():
        KVLayout.merge(layouts)
