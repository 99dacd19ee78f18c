"""The laws of the design, over related layouts drawn by hypothesis."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import kvplan
from kvplan.plan import loops_numpy
from tests import oracle
from tests.strategies import Case, cases, layout_of, neighbour_cases, opaque_beside_rows


def compiled(case: Case):
    src, dst = case.src.build(case.seed), case.dst.build(case.seed + 1)
    program = kvplan.compile(layout_of(src), layout_of(dst))
    return src, dst, program, program.plan(case.src_ids, case.dst_ids, case.src_skip, case.dst_skip)


@given(case=cases())
@settings(max_examples=max(2000, settings.default.max_examples))
def test_laws_1_and_2_executing_equals_copying_by_coordinates_and_touches_nothing_else(case, executor):
    src, dst, program, plan = compiled(case)
    expected = case.dst.build(case.seed + 1)
    oracle.copy(src, expected, case.src_ids, case.dst_ids, case.src_skip, case.dst_skip, case.unit_tokens, case.units)
    assert program.unit_tokens == case.unit_tokens
    result = executor.submit(plan).result()
    assert result.nbytes == plan.nbytes == case.units * program.unit_nbytes
    for got, want in zip(dst.roots, expected.roots, strict=True):
        np.testing.assert_array_equal(got, want)


@given(case=opaque_beside_rows())
@settings(max_examples=max(300, settings.default.max_examples))
def test_laws_1_to_5_of_rows_and_opaque_sub_blocks_under_the_same_ids(case, executor):
    rows, pages = ([form.build(case.seed + k) for k, form in enumerate(pair)] for pair in (case.rows, case.pages))
    src, dst = (
        kvplan.KVLayout.merge([layout_of(row), layout_of(page, "index")]) for row, page in zip(rows, pages, strict=True)
    )
    refused = ""
    try:
        program = kvplan.compile(src, dst)
    except kvplan.IncompatibleLayoutsError as error:
        refused = str(error)
    if refused:  # a page holds more tokens than a split token axis repeats
        assert "no unit that holds whole sub-blocks" in refused
        assert any("token.1" in form.sizes for form in case.rows)
        return
    tokens, each = program.unit_tokens, program.unit_tokens // case.page_tokens
    assert tokens == each * case.page_tokens  # a unit is whole sub-blocks
    if case.units % each or any(skip % each for skip in case.skips):
        return
    units, skips = case.units // each, tuple(skip // each for skip in case.skips)
    expected = [pair[1].build(case.seed + 1) for pair in (case.rows, case.pages)]
    oracle.copy(rows[0], expected[0], *case.ids, *skips, tokens, units)
    oracle.copy(pages[0], expected[1], *case.ids, *skips, each, units)
    before = [root.copy() for cache in (rows[0], pages[0]) for root in cache.roots]
    plan = program.plan(*case.ids, *skips)
    moves = oracle.byte_moves(plan.descriptors())
    assert len(moves) == plan.nbytes == units * program.unit_nbytes
    assert moves == oracle.factored_moves(plan) == oracle.strided_moves(plan.strided())
    assert by_dst(twin_of(plan)) == by_dst(plan.descriptors())
    executor.submit(plan).synchronize()
    for cache, want in zip((rows[1], pages[1]), expected, strict=True):
        for got, root in zip(cache.roots, want.roots, strict=True):
            np.testing.assert_array_equal(got, root)
    for cache in (rows[0], pages[0]):
        wipe(cache, sorted(moves.values()))
    executor.submit(kvplan.compile(dst, src).plan(*case.ids[::-1], *skips[::-1])).synchronize()
    for got, want in zip([root for cache in (rows[0], pages[0]) for root in cache.roots], before, strict=True):
        np.testing.assert_array_equal(got, want)


@given(case=st.one_of(cases(), neighbour_cases()))
@settings(max_examples=max(400, settings.default.max_examples))
def test_law_3_all_lowerings_are_the_same_byte_moves(case):
    _, _, _, plan = compiled(case)
    flat = plan.descriptors()
    moves = oracle.byte_moves(flat)
    assert len(moves) == plan.nbytes
    assert oracle.factored_moves(plan) == moves
    assert oracle.strided_moves(plan.strided()) == moves
    assert by_dst(twin_of(plan)) == by_dst(flat)


@given(case=st.one_of(cases(), neighbour_cases()))
@settings(max_examples=max(400, settings.default.max_examples))
def test_law_4_descriptors_are_minimal_and_complete(case):
    _, _, _, plan = compiled(case)
    src, dst, size = plan.descriptors()
    assert int(size.sum()) == plan.nbytes
    assert all(column.dtype == np.int64 and column.flags.c_contiguous for column in (src, dst, size))
    assert len(src) == len(dst) == len(size)
    starts = set(zip(src.tolist(), dst.tolist(), strict=True))
    ends = set(zip((src + size).tolist(), (dst + size).tolist(), strict=True))
    assert not starts & ends, "two descriptors could be merged"


@given(case=cases(same_heads=True))
@settings(max_examples=max(400, settings.default.max_examples))
def test_law_5_there_and_back_restores(case, executor):
    src, _, there, plan = compiled(case)
    before = [root.copy() for root in src.roots]
    executor.submit(plan).synchronize()
    distinct = len(set(case.src_ids)) == len(case.src_ids)
    if not distinct:
        return  # one source in two places has no one way back
    image = sorted(oracle.byte_moves(plan.descriptors()).values())
    wipe(src, image)
    back = kvplan.compile(there.dst, there.src)
    executor.submit(back.plan(case.dst_ids, case.src_ids, case.dst_skip, case.src_skip)).synchronize()
    for got, want in zip(src.roots, before, strict=True):
        np.testing.assert_array_equal(got, want)


@given(case=cases())
@settings(max_examples=max(400, settings.default.max_examples))
def test_law_7_a_plan_of_two_lists_moves_what_two_plans_move(case):
    _, _, program, plan = compiled(case)
    f, g = program.src.block_tokens // program.unit_tokens, program.dst.block_tokens // program.unit_tokens
    if case.src_skip or case.dst_skip or case.units % (f * g):
        return
    blocks = case.units // (f * g) // 2
    first = program.plan(case.src_ids[: blocks * g], case.dst_ids[: blocks * f])
    second = program.plan(case.src_ids[blocks * g :], case.dst_ids[blocks * f :])
    both = kvplan.join([first, second])
    assert both.nbytes == first.nbytes + second.nbytes == plan.nbytes
    assert by_dst(both.descriptors()) == by_dst(plan.descriptors())


@given(case=cases())
@settings(max_examples=max(400, settings.default.max_examples))
def test_law_8_the_program_does_not_depend_on_how_a_layout_is_written(case):
    src, dst, program, plan = compiled(case)
    same = layout_of(src)
    assert same == program.src
    assert hash(same) == hash(program.src)
    assert str(same) == str(program.src)
    again = kvplan.compile(same, layout_of(dst)).plan(case.src_ids, case.dst_ids, case.src_skip, case.dst_skip)
    assert by_dst(again.descriptors()) == by_dst(plan.descriptors())


def by_dst(made) -> list[tuple[int, int, int]]:
    return sorted(zip(*(column.tolist() for column in made), strict=True))


def twin_of(plan, max_nbytes=None):
    parts = [(*part.group.offsets, part.units) for part in plan.parts]
    return loops_numpy.flat(parts, plan.seams.src, plan.seams.dst, max_nbytes)


def wipe(cache: oracle.Cache, addresses: list[int]) -> None:
    for root in cache.roots:
        start = root.ctypes.data
        inside = [address - start for address in addresses if start <= address < start + root.size]
        root[inside] ^= 0xFF
