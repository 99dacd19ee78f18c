"""Law 8: a fast path skips work whose result is known; it equals its slow twin."""

from __future__ import annotations

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

import kvplan
from kvplan import KVLayout
from kvplan.plan import descriptors, loops_numba
from tests.compiled_cases import by_dst, compiled
from tests.plan.slow_twins import without_numba
from tests.profiles import examples
from tests.ranks.rank_specs import written
from tests.ranks.topologies import reshards, shards_of
from tests.strategies import cases, layout_of, neighbour_cases


@given(case=cases())
@examples(400)
def test_a_program_is_cached_by_what_a_layout_means(case):
    """Law 8: an equal layout, built again, has the same program and moves the same bytes."""
    src, dst, program, plan = compiled(case)
    same = layout_of(src)
    assert same == program.src
    assert hash(same) == hash(program.src)
    assert str(same) == str(program.src)
    again = kvplan.compile(same, layout_of(dst)).plan(case.src_ids, case.dst_ids, case.src_skip, case.dst_skip)
    assert by_dst(again.descriptors()) == by_dst(plan.descriptors())


@examples(250)
@given(
    src=st.lists(st.integers(-2, 9), max_size=6), dst=st.lists(st.integers(-2, 5), max_size=6),
    tokens=st.sampled_from([(4, 4), (4, 8), (8, 4), (4, 12)]), skips=st.tuples(st.integers(0, 2), st.integers(0, 2)),
)  # fmt: skip
@example(src=[0, 1, 2, 3], dst=[2, 2], tokens=(4, 8), skips=(0, 0))
@example(src=[1, -1], dst=[7, 7], tokens=(4, 4), skips=(0, 0))
def test_ids_are_refused_in_the_same_words(src, dst, tokens, skips):
    """Law 8: numpy loops refuse block ids with the same errors as the compiled loops."""
    sides = [KVLayout.from_tensors("block token dim", np.zeros((6, size, 8), np.uint8)) for size in tokens]
    program = kvplan.compile(*sides)

    def planned():
        try:
            return [part.units.tolist() for part in program.plan(src, dst, *skips).parts]
        except kvplan.KVPlanError as error:
            return type(error), str(error)

    expected = planned()
    with without_numba():
        assert planned() == expected


@examples(250)
@given(ids=st.lists(st.integers(0, 9), max_size=12), rising=st.booleans())
def test_rising_ids_skip_a_search_whose_result_is_known(ids, rising):
    """Law 8: rising ids need no search for a block that is named twice."""
    dst_ids = np.array(sorted(ids) if rising else ids, dtype=np.int64)
    seen = np.zeros(4, np.uint64)
    found = loops_numba._twice(dst_ids, 0, 1, dst_ids.size, seen)
    assert (found >= 0) == (len(set(ids)) < len(ids))
    assert not seen.any()


@examples(250)
@given(case=neighbour_cases())
def test_an_irregular_program_falls_back_to_sorting(case):
    """Law 8: merging by the program's seams equals merging by sorting."""
    _, _, _, plan = compiled(case)
    expected = by_dst(plan.descriptors())
    limit, descriptors.MAX_CANDIDATES = descriptors.MAX_CANDIDATES, -1
    descriptors.possible_merges.cache_clear()
    try:
        assert by_dst(plan.descriptors()) == expected
    finally:
        descriptors.MAX_CANDIDATES = limit
        descriptors.possible_merges.cache_clear()


@examples(100)
@given(case=reshards())
def test_views_of_whole_blocks_move_what_stretches_one_by_one_do(case):
    """Law 8: a rank's views of whole blocks move what its stretches of tokens move one by one."""
    programs = kvplan.reshard(*shards_of(case))
    for program in programs.values():
        fast = written([program.plan(*case.ids, *case.skips)])
        for move in program._moves:
            move._whole = None
        assert written([program.plan(*case.ids, *case.skips)]) == fast
