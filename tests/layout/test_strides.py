"""The algebra against brute force over every coordinate."""

from __future__ import annotations

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from kvplan.layout import strides as algebra
from tests.profiles import examples

FACTORS = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 12)), max_size=3).map(tuple)


def offsets(factors) -> list[int]:
    digits = product(*(range(count) for count, _ in factors))
    return [sum(d * stride for d, (_, stride) in zip(digit, factors, strict=True)) for digit in digits]


@examples(250)
@given(factors=FACTORS)
def test_offsets_normal_form_extent_and_span(factors):
    every = offsets(factors)
    assert algebra.extent(factors) == len(every)
    assert [algebra.offset(factors, k) for k in range(len(every))] == every
    assert offsets(algebra.normal(factors)) == every
    assert algebra.span(factors) == max(every)


@st.composite
def refinements(draw):
    src, dst = draw(FACTORS), draw(FACTORS)
    sizes = algebra.extent(src), algebra.extent(dst)
    starts = [draw(st.integers(0, size - 1)) for size in sizes]
    return src, starts[0], dst, starts[1], draw(st.integers(1, min(s - k for s, k in zip(sizes, starts, strict=True))))


@examples(250)
@given(case=refinements())
def test_a_refinement_visits_every_coordinate_once(case):
    src, src_start, dst, dst_start, count = case
    visited = []
    for piece in algebra.refine(*case):
        for digit in product(*(range(loop[0]) for loop in piece.loops)):
            a = sum(d * loop[1] for d, loop in zip(digit, piece.loops, strict=True))
            b = sum(d * loop[2] for d, loop in zip(digit, piece.loops, strict=True))
            visited.append((piece.src + a, piece.dst + b))
    expected = zip(offsets(src)[src_start:], offsets(dst)[dst_start:], strict=False)
    assert sorted(visited) == sorted(list(expected)[:count])


LOOPS = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 40), st.integers(1, 40)), max_size=4)


@examples(250)
@given(nbytes=st.integers(1, 8), loops=LOOPS)
def test_coalescing_keeps_the_byte_moves(nbytes, loops):
    def moves(nbytes, loops):
        out = []
        for digit in product(*(range(loop[0]) for loop in loops)):
            a = sum(d * loop[1] for d, loop in zip(digit, loops, strict=True))
            b = sum(d * loop[2] for d, loop in zip(digit, loops, strict=True))
            out += [(a + k, b + k) for k in range(nbytes)]
        return sorted(out)

    merged, rest = algebra.coalesce(nbytes, loops)
    assert moves(merged, rest) == moves(nbytes, loops)
    assert all(loop[1:] != (merged, merged) and loop[0] > 1 for loop in rest)
