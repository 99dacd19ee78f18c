"""Components and regions by hand: where registrations touch, what lies in which allocation; and overlaps by law."""

from __future__ import annotations

import re
from itertools import product

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvplan import LayoutError
from kvplan.layout.address_ranges import check_bounds
from kvplan.layout.components import INT64_MAX, Component, Form, Region, touching_seams
from kvplan.layout.disjoint import check_disjoint
from tests.profiles import examples

ROWS = Form(block=((3, 32),), token=((2, 16),), head=(), dim=((8, 1),))  # 88 bytes from end to end
TABLE = Form(block=(), token=((2, 16),), head=(), dim=((8, 1),), table=(64, 0, 200))


@pytest.mark.parametrize(("first", "second", "marks"), [
    (True, True, (64,)), (True, False, (64,)), (False, True, (64,)), (False, False, ()),
])  # fmt: skip
def test_a_seam_lies_where_a_pinned_allocation_touches_another(first, second, marks):
    below, above = Region(0, 64, pinned=first), Region(64, 32, pinned=second)
    assert touching_seams([below, above]) == marks
    assert touching_seams([above, below]) == marks


@pytest.mark.parametrize(("form", "regions", "fits"), [
    (ROWS, [(1000, 88)], True),
    (ROWS, [(1000, 87)], False),
    (ROWS, [(1001, 87)], False),
    (ROWS, [(0, 1000), (1000, 88), (1088, 9)], True),
    (ROWS, [(0, 1000), (1000, 87), (1088, 9)], False),
    (ROWS, [(900, 188), (990, 20)], True),  # a view within another: the outer one holds it
    (ROWS, [(900, 187), (990, 20)], False),
    (TABLE, [(1000, 24), (1064, 24), (1200, 24)], True),
    (TABLE, [(1000, 23), (1064, 24), (1200, 24)], False),
    (TABLE, [(1000, 24), (1065, 23), (1200, 24)], False),
    (TABLE, [(1000, 24), (1064, 24), (1200, 23)], False),
])  # fmt: skip
def test_a_block_lies_in_one_allocation_to_the_last_byte(form, regions, fits):
    for order in (regions, regions[::-1]):
        made = [Region(*region) for region in order]
        if fits:
            check_bounds([Component(2, "v", 1000, form)], made)
        else:
            with pytest.raises(LayoutError, match=r"^layer 2 'v' reaches bytes \[0x[0-9a-f]+, 0x[0-9a-f]+\), outside"):
                check_bounds([Component(2, "v", 1000, form)], made)


def test_bytes_before_every_allocation_are_outside_the_first():
    with pytest.raises(LayoutError, match=r"bytes \[0x0, 0x58\), outside its allocation \[0x64, 0xc8\)"):
        check_bounds([Component(0, "k", 0, ROWS)], [Region(100, 100), Region(300, 100)])


def test_the_last_address_is_that_of_an_int64():
    check_bounds([Component(0, "k", INT64_MAX - 88, ROWS)], [Region(INT64_MAX - 88, 88)])
    with pytest.raises(LayoutError, match="past the largest int64 address"):
        check_bounds([Component(0, "k", INT64_MAX - 87, ROWS)], [Region(INT64_MAX - 87, 88)])


FACTORS = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 12)), max_size=2).map(tuple)


def offsets(factors) -> list[int]:
    return [sum(digit) for digit in product(*([k * stride for k in range(count)] for count, stride in factors))]


@st.composite
def forms(draw) -> Form:
    dim = ((draw(st.integers(1, 4)), 1),)
    table = draw(st.none() | st.lists(st.integers(0, 40), min_size=1, max_size=3).map(tuple))
    block = () if table is not None else draw(FACTORS)
    return Form(block=block, token=draw(FACTORS), head=(), dim=dim, table=table)


@st.composite
def sets_of_components(draw) -> list[Component]:
    shared = draw(st.lists(forms(), min_size=1, max_size=2))
    count = draw(st.integers(1, 4))
    step = draw(st.integers(0, 40))
    addresses = [k * step for k in range(count)] if draw(st.booleans()) else [
        draw(st.integers(0, 80)) for _ in range(count)]  # fmt: skip
    return [Component(k, "k", at, draw(st.sampled_from(shared))) for k, at in enumerate(addresses)]


def bytes_of(component: Component) -> list[int]:
    form = component.form
    blocks = form.table if form.table is not None else offsets(form.block)
    return [component.address + block + at for block in blocks for at in offsets(form.inner)]


def block_of(component: Component, block: int) -> list[int]:
    start = component.address + component.form.block_offset(block)
    return [start + at for at in offsets(component.form.inner)]


def looked_up(*table: int) -> Form:
    return Form(block=(), token=(), head=(), dim=((4, 1),), table=table)


NEAR = looked_up(0, 4, 100)  # two blocks that touch, and one apart


@examples(250)
@given(components=sets_of_components())
@example(components=[Component(0, "k", 0, NEAR), Component(1, "k", 4, NEAR)])
@example(components=[Component(0, "k", 0, looked_up(0)), Component(1, "k", 3, looked_up(0, 50))])  # the last byte
@example(components=[Component(0, "k", 0, looked_up(0)), Component(1, "k", 4, looked_up(0, 50))])
@example(components=[Component(0, "k", 3, looked_up(0)), Component(1, "k", 0, looked_up(50, 0))])
def test_components_are_refused_just_where_two_coordinates_share_a_byte(components):
    every = [byte for component in components for byte in bytes_of(component)]
    if len(set(every)) == len(every):
        check_disjoint(components)
        return
    with pytest.raises(LayoutError, match=r"overlap.*share bytes") as caught:
        check_disjoint(components)
    named = re.findall(r"layer (\d) 'k'(?: of block (\d+))?", str(caught.value))
    shared = [
        byte
        for layer, block in named
        for byte in (block_of(components[int(layer)], int(block)) if block else bytes_of(components[int(layer)]))
    ]
    assert len(set(shared)) < len(shared), "those that are named share bytes"
