"""KV-cache groups as one plan: own blocks, own ids, own front; memory that they share; nothing to move."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvplan
from kvplan import BlockIndexError, Groups, KVLayout, OverlapError
from tests import oracle
from tests.profiles import examples
from tests.strategies import cases, layout_of


def cache(layers, tokens, blocks=64, memory=None):
    shape = (len(layers), blocks, 2, tokens, 2, 8)
    return KVLayout.from_tensors(
        "layer block kv token head dim", np.zeros(shape, np.int8) if memory is None else memory, layers=layers
    )


@st.composite
def requests(draw):
    """A group and a request in it: all of its blocks on both sides, and how many source blocks are gone."""
    case = draw(cases(max_blocks=6))
    tokens = case.src.block_tokens, case.dst.block_tokens
    most = min(case.src.sizes["block"] * tokens[0], case.dst.sizes["block"] * tokens[1])
    length = draw(st.integers(0, most // case.unit_tokens)) * case.unit_tokens
    lists = [draw(st.permutations(range(form.sizes["block"])))[: -(-length // n)]
             for form, n in zip((case.src, case.dst), tokens, strict=True)]  # fmt: skip
    return case, lists, draw(st.integers(0, len(lists[0]))), draw(st.booleans())


@examples(100)
@given(drawn=st.lists(requests(), min_size=1, max_size=3))
def test_every_group_moves_its_request_from_its_front_on(drawn, executor):
    programs, sides, firsts, wanted = [], ([], []), ([], []), []
    kept = []
    for case, lists, gone, told in drawn:
        src, dst, expected = case.src.build(case.seed), case.dst.build(case.seed + 1), case.dst.build(case.seed + 1)
        unit = case.unit_tokens
        tokens = src.block_tokens, dst.block_tokens
        start = gone * tokens[0]
        units = min(len(ids) * n for ids, n in zip(lists, tokens, strict=True)) // unit - start // unit
        alive = units > 0
        sides[0].append(lists[0][gone:] if alive else [])
        sides[1].append(lists[1][start // tokens[1] :] if alive else [])
        firsts[0].append(gone)
        firsts[1].append(start // tokens[1] if told else None)
        if alive:
            oracle.copy(src, dst=expected, src_ids=lists[0], dst_ids=lists[1], src_skip=start // unit,
                        dst_skip=start // unit, unit_tokens=unit, units=units)  # fmt: skip
        programs.append(kvplan.compile(layout_of(src), layout_of(dst)))
        wanted.append((dst, expected))
        kept.append(src)
    told = None if None in firsts[1] else firsts[1]
    executor.submit(Groups(programs).plan(*sides, src_first=firsts[0], dst_first=told)).synchronize()
    for dst, expected in wanted:
        for root, want in zip(dst.roots, expected.roots, strict=True):
            np.testing.assert_array_equal(root, want)


def test_a_window_begins_in_the_middle_of_a_larger_block():
    """Five blocks of 16 are gone: token 80 is unit 1 of the second block of 64."""
    groups = Groups(
        [kvplan.compile(cache((0,), 16), cache((0,), 64)), kvplan.compile(cache((1,), 16), cache((1,), 64))]
    )
    plan = groups.plan([range(8), [40, 41, 42]], [[0, 1], [5]], src_first=[0, 5])
    assert (plan.units, plan.nbytes) == (11, 11 * 2 * 16 * 16)
    alone = groups.programs[1].plan([40, 41, 42], [5], dst_skip=1)
    full = groups.programs[0].plan(range(8), [0, 1])
    assert oracle.byte_moves(plan.descriptors()) == oracle.byte_moves(kvplan.join([full, alone]).descriptors())
    load = Groups([kvplan.compile(cache((1,), 64), cache((1,), 16))])
    plan = load.plan([[5]], [[40, 41, 42]], src_first=[1], dst_first=[5])
    with pytest.raises(BlockIndexError, match="group 0: 2 src blocks cover 7 units, 3 dst blocks cover 3"):
        load.plan([[5, 6]], [[40, 41, 42]], src_first=[1], dst_first=[5])
    assert plan.units == 3


def test_groups_that_lie_over_one_another_are_told_apart_by_their_ids():
    memory = np.zeros((1, 64, 2, 16, 2, 8), np.int8)
    full, window = cache((0,), 16, memory=memory), cache((1,), 16, memory=memory)
    pools = [KVLayout.from_tensors("layer block kv token head dim", np.random.default_rng(k).integers(
        0, 255, (1, 8, 2, 16, 2, 8), np.uint8), layers=(k,)) for k in (0, 1)]  # fmt: skip
    groups = Groups([kvplan.compile(pool, group) for pool, group in zip(pools, (full, window), strict=True)])
    with kvplan.Executor() as executor:
        executor.submit(groups.plan([[0, 1], [2, 3]], [[9, 4], [5, 60]])).synchronize()
    for k, (src, dst) in enumerate([([0, 1], [9, 4]), ([2, 3], [5, 60])]):
        np.testing.assert_array_equal(memory.view(np.uint8)[0, dst], pools[k].tensors[0, src])
    with pytest.raises(OverlapError, match="two of the joined plans write address"):
        groups.plan([[0, 1], [2, 3]], [[9, 4], [4, 60]])


def test_groups_without_blocks_move_nothing():
    groups = Groups([kvplan.compile(cache((k,), 16), cache((k,), 16)) for k in range(3)])
    assert groups.plan([[], [1], []], [[], [2], []], src_first=[0, 7, 99]).units == 1
    assert groups.plan([[], [], []], [[], [], []]).nbytes == 0


def test_a_rank_of_a_resharding_is_a_group():
    ranks = [KVLayout.from_tensors("block token dim", np.zeros((8, 16, 4), np.int8), part=f"c{k}") for k in range(2)]
    pool = KVLayout.from_tensors("block token dim", np.zeros((4, 64, 4), np.int8), part="c0")
    groups = Groups([kvplan.reshard(ranks[0], pool)[0, 0], kvplan.compile(ranks[1], ranks[1].slice())])
    assert groups.plan([[3, 4], []], [[0, 1], []], src_first=[3, 0]).units == 2  # token 48, and token 64
    assert repr(groups).startswith("Groups(PairProgram(layer 0, c0), CopyProgram(")
