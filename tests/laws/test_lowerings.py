"""Law 3: all lowerings of a plan describe the same byte moves."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import kvplan
from kvplan.plan.descriptors import NixlList
from tests import oracle
from tests.compiled_cases import by_dst, compiled, twin_of
from tests.plan.slow_twins import without_numba
from tests.profiles import examples
from tests.strategies import cases, layout_of, neighbour_cases


@given(case=st.one_of(cases(), neighbour_cases()))
@examples(400)
def test_all_lowerings_are_the_same_byte_moves(case):
    """Law 3: flat, strided and factored forms and the numpy twin are the same byte moves."""
    _, _, _, plan = compiled(case)
    flat = plan.descriptors()
    moves = oracle.byte_moves(flat)
    assert len(moves) == plan.nbytes
    assert oracle.factored_moves(plan) == moves
    assert oracle.strided_moves(plan.strided()) == moves
    assert by_dst(twin_of(plan)) == by_dst(flat)


@examples(250)
@given(case=st.one_of(cases(), neighbour_cases()))
def test_lowerings_without_numba(case):
    """Laws 3 and 8: a process without numba plans and lowers to the same byte moves."""
    _, _, program, plan = compiled(case)
    flat, capped = by_dst(plan.descriptors()), by_dst(plan.descriptors(max_nbytes=7))
    rows = plan.strided().tolist()
    with without_numba():
        again = program.plan(case.src_ids, case.dst_ids, case.src_skip, case.dst_skip)
        assert by_dst(again.descriptors()) == flat
        assert by_dst(again.descriptors(max_nbytes=7)) == capped
        assert again.strided().tolist() == rows
    for part, other in zip(plan.parts, again.parts, strict=True):
        np.testing.assert_array_equal(part.units, other.units)


def spread(made: NixlList) -> list[tuple[int, int]]:
    """Every descriptor NIXL makes of a list, in its order: rows, each so many times."""
    found = []
    for address, nbytes, _, *more in made.rows.tolist():
        stride, times = more or (nbytes, 1)
        found += [(address + k * stride, nbytes) for k in range(times)]
    return found


@examples(250)
@given(case=st.one_of(cases(), neighbour_cases()))
def test_nixl_lists_are_the_byte_moves_of_the_plan(case):
    """Law 3: both of NIXL's lists, flat and strided, are the byte moves of the plan."""
    program = kvplan.compile(layout_of(case.src.build(case.seed)), layout_of(case.dst.build(case.seed + 1)))
    plan = program.plan(case.src_ids, case.dst_ids, case.src_skip, case.dst_skip)
    expected = oracle.byte_moves(plan.descriptors())
    for strided in (False, True):
        src, dst = (plan.nixl(side, strided=strided) for side in ("src", "dst"))
        assert src.rows.flags.c_contiguous
        assert src.descriptors == len(spread(src)) == dst.descriptors
        moved = {}
        for (a, n), (b, m) in zip(spread(src), spread(dst), strict=True):
            assert n == m
            moved |= {b + k: a + k for k in range(n)}
        assert moved == expected
        assert (np.diff(dst.rows[:, 0]) > 0).all()
        if strided:
            assert (src.rows[:, 3] >= src.rows[:, 1]).all()
            assert (dst.rows[:, 3] >= dst.rows[:, 1]).all()
