"""Laws 3 and 4: all lowerings are the same byte moves; descriptors are minimal, complete, and cross no seam."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import kvplan
from kvplan.plan import descriptors
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


@given(case=st.one_of(cases(), neighbour_cases()))
@examples(400)
def test_descriptors_are_minimal_and_complete(case):
    """Law 4: no two descriptors could be one, and their sizes add up to the plan's bytes."""
    _, _, _, plan = compiled(case)
    src, dst, size = plan.descriptors()
    assert int(size.sum()) == plan.nbytes
    assert all(column.dtype == np.int64 and column.flags.c_contiguous for column in (src, dst, size))
    assert len(src) == len(dst) == len(size)
    starts = set(zip(src.tolist(), dst.tolist(), strict=True))
    ends = set(zip((src + size).tolist(), (dst + size).tolist(), strict=True))
    assert not starts & ends, "two descriptors could be merged"


@st.composite
def seamed(draw):
    case = draw(st.one_of(cases(), neighbour_cases()))
    src, dst, _, _ = compiled(case)
    sides = []
    for cache in (src, dst):
        inside = [root.ctypes.data + draw(st.integers(0, root.size)) for root in cache.roots]
        sides.append(np.array(sorted(set(inside)), dtype=np.int64))
    return case, src, dst, sides, draw(st.none() | st.integers(1, 40))


@examples(250)
@given(drawn=seamed())
def test_no_descriptor_crosses_a_seam_and_pieces_are_minimal(drawn):
    """Law 4: no descriptor crosses a seam or exceeds the cap, and no two pieces could be one."""
    case, src, dst, sides, cap = drawn
    from tests.strategies import layout_of

    program = kvplan.compile(layout_of(src), layout_of(dst))
    plan = program.plan(case.src_ids, case.dst_ids, case.src_skip, case.dst_skip)
    whole = oracle.byte_moves(plan.descriptors())
    plan.seams = descriptors.Seams(*sides)
    d = plan.descriptors(max_nbytes=cap)
    assert oracle.byte_moves(d) == whole
    assert by_dst(d) == by_dst(twin_of(plan, cap))
    seams = [set(side.tolist()) for side in sides]
    starts = {(a, b): n for a, b, n in zip(*(c.tolist() for c in d), strict=True)}
    for a, b, n in zip(*(c.tolist() for c in d), strict=True):
        assert cap is None or n <= cap
        assert not any(a < s < a + n for s in seams[0])
        assert not any(b < s < b + n for s in seams[1])
        following = starts.get((a + n, b + n))
        if following is not None:
            assert a + n in seams[0] or b + n in seams[1] or n + following > cap
    assert oracle.strided_moves(plan.strided()) == whole
    for a, b, w, h, p, q in plan.strided().tolist():
        assert not any(a < s < a + (h - 1) * p + w for s in seams[0])
        assert not any(b < s < b + (h - 1) * q + w for s in seams[1])
