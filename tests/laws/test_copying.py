"""Laws 1 and 2: executing a plan copies by logical coordinates, and touches nothing else."""

from __future__ import annotations

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

import kvplan
from kvplan import KVLayout
from kvplan.nixl import NixlAgent
from tests import oracle
from tests.compiled_cases import by_dst, compiled, twin_of, wipe
from tests.nixl.double import Agent, Network
from tests.profiles import examples
from tests.strategies import cases, layout_of, neighbour_cases, opaque_beside_rows


@given(case=cases())
@examples(2000)
def test_executing_copies_by_coordinates_and_touches_nothing_else(case, executor):
    """Laws 1 and 2: the executor writes what the oracle writes, and every other byte stays as it was."""
    src, dst, program, plan = compiled(case)
    expected = case.dst.build(case.seed + 1)
    oracle.copy(src, expected, case.src_ids, case.dst_ids, case.src_skip, case.dst_skip, case.unit_tokens, case.units)
    assert program.unit_tokens == case.unit_tokens
    result = executor.submit(plan).result()
    assert result.nbytes == plan.nbytes == case.units * program.unit_nbytes
    for got, want in zip(dst.roots, expected.roots, strict=True):
        np.testing.assert_array_equal(got, want)


@given(case=opaque_beside_rows())
@examples(300)
def test_rows_and_opaque_sub_blocks_under_the_same_ids(case, executor):
    """Laws 1 to 5 for caches that hold rows of tokens and opaque sub-blocks under the same block ids."""
    rows, pages = ([form.build(case.seed + k) for k, form in enumerate(pair)] for pair in (case.rows, case.pages))
    src, dst = (
        KVLayout.merge([layout_of(row), layout_of(page, "index")]) for row, page in zip(rows, pages, strict=True)
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


@examples(250)
@given(case=st.one_of(cases(), neighbour_cases()))
def test_memmove_copies_by_coordinates(case, executor, sparing_executor):
    """Laws 1 and 2 for the host path without numba."""
    src, dst, _, plan = compiled(case)
    expected = case.dst.build(case.seed + 1)
    oracle.copy(src, expected, case.src_ids, case.dst_ids, case.src_skip, case.dst_skip, case.unit_tokens, case.units)
    result = sparing_executor.submit(plan).result()
    assert result.descriptors == executor.submit(plan).result().descriptors
    for got, want in zip(dst.roots, expected.roots, strict=True):
        np.testing.assert_array_equal(got, want)


@examples(250)
@given(case=cases())
def test_nixl_agents_copy_by_coordinates(case):
    """Laws 1 and 2 for a transfer between two NIXL agents."""
    network = Network(looks=0)
    src, dst = case.src.build(case.seed), case.dst.build(case.seed + 1)
    expected = case.dst.build(case.seed + 1)
    oracle.copy(src, expected, case.src_ids, case.dst_ids, case.src_skip, case.dst_skip, case.unit_tokens, case.units)
    with (
        NixlAgent("a", {"src": layout_of(src)}, agent=Agent(network, "a")) as a,
        NixlAgent("b", {"dst": layout_of(dst)}, agent=Agent(network, "b")) as b,
    ):
        peer = b.meet(a.card())
        program = kvplan.compile(peer.layouts["src"], b.layouts["dst"])
        peer.submit(program.plan(case.src_ids, case.dst_ids, case.src_skip, case.dst_skip)).synchronize()
    for got, want in zip(dst.roots, expected.roots, strict=True):
        np.testing.assert_array_equal(got, want)


@examples(100)
@example(widths=(4, 4), store=True, seed=0)
@given(widths=st.tuples(st.integers(1, 9), st.integers(1, 9)), store=st.booleans(), seed=st.integers(0, 99))
def test_k_and_v_that_one_side_fuses_are_copied_half_by_half(widths, store, seed, executor):
    """Law 1 where one side holds K and V in one row of content, and the other apart, each with its own width."""
    rng = np.random.default_rng(seed)
    fused = rng.integers(0, 256, (2, 5, 4, 3, sum(widths)), np.uint8)
    apart = [rng.integers(0, 256, (5, 2, 3, 4, width), np.uint8) for width in widths]
    notation = "block layer head token dim"
    if widths[0] == widths[1]:
        halves = KVLayout.from_tensors(f"kv: {notation}", apart)
    else:
        pairs = zip(apart, "kv", strict=True)
        halves = KVLayout.merge([KVLayout.from_tensors(notation, half, part=name) for half, name in pairs])
    sides = [KVLayout.from_tensors("layer block token head dim", fused), halves]
    src, dst = ([3, 0, 4], [1, 2, 0]) if store else ([1, 2, 0], [3, 0, 4])
    executor.submit(kvplan.compile(*(sides if store else sides[::-1])).plan(src, dst)).synchronize()
    for one, other in zip((fused[..., : widths[0]], fused[..., widths[0] :]), apart, strict=True):
        there = other.transpose(1, 0, 3, 2, 4)
        np.testing.assert_array_equal(one[:, [3, 0, 4]], there[:, [1, 2, 0]])
