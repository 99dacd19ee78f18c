"""Laws 1, 2 and 5: a plan copies by logical coordinates, and touches nothing else; the way back restores every byte."""

from __future__ import annotations

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

import kvplan
from kvplan import KVLayout
from kvplan.nixl import NixlAgent
from tests import oracle
from tests.catalogue.named_pairs import held, transfers
from tests.compiled_cases import assert_same, by_dst, compiled, twin_of, wipe
from tests.nixl.double import Agent, Network
from tests.profiles import examples
from tests.strategies import cases, layout_of, neighbour_cases, opaque_beside_rows


@given(case=cases())
@examples(2000)
def test_executing_copies_by_coordinates_and_touches_nothing_else(case, executor):
    """Laws 1 and 2: the executor writes what the oracle writes, and every other byte stays as it was."""
    src, dst, program, plan = compiled(case)
    expected = case.moved(src)
    assert program.unit_tokens == case.unit_tokens
    result = executor.submit(plan).result()
    assert result.nbytes == plan.nbytes == case.units * program.unit_nbytes
    assert_same([dst], [expected])


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
    assert_same([rows[1], pages[1]], expected)
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
    expected = case.moved(src)
    result = sparing_executor.submit(plan).result()
    assert result.descriptors == executor.submit(plan).result().descriptors
    assert_same([dst], [expected])


@examples(250)
@given(case=cases())
def test_nixl_agents_copy_by_coordinates(case):
    """Laws 1 and 2 for a transfer between two NIXL agents."""
    network = Network(looks=0)
    src, dst = case.src.build(case.seed), case.dst.build(case.seed + 1)
    expected = case.moved(src)
    with (
        NixlAgent("a", {"src": layout_of(src)}, agent=Agent(network, "a")) as a,
        NixlAgent("b", {"dst": layout_of(dst)}, agent=Agent(network, "b")) as b,
    ):
        peer = b.meet(a.card())
        program = kvplan.compile(peer.layouts["src"], b.layouts["dst"])
        peer.submit(program.plan(case.src_ids, case.dst_ids, case.src_skip, case.dst_skip)).synchronize()
    assert_same([dst], [expected])


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


@given(case=cases(same_heads=True))
@examples(400)
def test_there_and_back_restores(case, executor):
    """Law 5: `compile(a, b)` and then `compile(b, a)` restore `a`."""
    src, _, there, plan = compiled(case)
    executor.submit(plan).synchronize()
    distinct = len(set(case.src_ids)) == len(case.src_ids)
    if not distinct:
        return  # one source in two places has no one way back
    image = sorted(oracle.byte_moves(plan.descriptors()).values())
    wipe(src, image)
    back = kvplan.compile(there.dst, there.src)
    executor.submit(back.plan(case.dst_ids, case.src_ids, case.dst_skip, case.src_skip)).synchronize()
    assert_same([src], [case.src.build(case.seed)])


@given(case=transfers())
@examples(500)
def test_random_pairs_move_every_byte_there_and_back(case, executor):
    """Laws 1, 2 and 5 for every pair of layouts in the catalogue."""
    device, host = case.device.form().build(case.seed), case.host.form().build(case.seed + 1)
    before, expected = case.device.form().build(case.seed), case.host.form().build(case.seed + 1)
    here, there = layout_of(device).slice(heads=held(case)), layout_of(host)
    to, fro = (case.device_ids, case.device_skip), (case.host_ids, case.host_skip)

    store = kvplan.compile(here, there)
    assert store.unit_tokens == case.unit_tokens
    executor.submit(store.plan(to[0], fro[0], to[1], fro[1])).synchronize()
    oracle.copy(before, expected, to[0], fro[0], to[1], fro[1], case.unit_tokens, case.units)
    assert_same([host, device], [expected, before])

    # Back, into the same blocks of a cache that holds something else.
    other, expected_back = case.device.form().build(case.seed + 2), case.device.form().build(case.seed + 2)
    load = kvplan.compile(there, layout_of(other))
    executor.submit(load.plan(fro[0], to[0], fro[1], to[1])).synchronize()
    oracle.copy(before, expected_back, to[0], to[0], to[1], to[1], case.unit_tokens, case.units)
    assert_same([other], [expected_back])
