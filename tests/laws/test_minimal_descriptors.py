"""Law 4: descriptors are minimal, complete, and cross no seam."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import kvplan
from kvplan.plan import descriptors
from tests import oracle
from tests.compiled_cases import by_dst, compiled, twin_of
from tests.profiles import examples
from tests.strategies import cases, neighbour_cases


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
