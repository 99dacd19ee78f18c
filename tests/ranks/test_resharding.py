"""Law 6: n ranks to m and back is the identity; every destination byte has one writer; replicas share the work."""

from __future__ import annotations

import numpy as np
import pytest

import kvplan
from kvplan import BlockIndexError, IncompatibleLayoutsError, KVLayout, LayoutError, OverlapError, Shard
from tests.ranks.rank_specs import NHD, SPLIT, rank, tp


def test_four_ranks_to_two_and_two_stages_to_one():
    four, two = tp(SPLIT, 4, 8, layers=range(4)), tp(NHD, 2, 8, layers=range(4))
    assert sorted(kvplan.reshard(four, two)) == [(0, 0), (1, 0), (2, 1), (3, 1)]
    assert sorted(kvplan.reshard(two, four)) == [(0, 0), (0, 1), (1, 2), (1, 3)]
    stages = [rank(SPLIT, heads=range(8), layers=layers) for layers in (range(3), range(3, 4))]
    programs = kvplan.reshard(four, stages)
    assert str(programs) == (
        "4 sources, 2 destinations, 8 pairs; skips count units of 16 tokens\n"
        "0 -> 0  layers 0-2, k v, heads 0-1\n"
        "0 -> 1  layer 3, k v, heads 0-1\n"
        "1 -> 0  layers 0-2, k v, heads 2-3\n"
        "1 -> 1  layer 3, k v, heads 2-3\n"
        "2 -> 0  layers 0-2, k v, heads 4-5\n"
        "2 -> 1  layer 3, k v, heads 4-5\n"
        "3 -> 0  layers 0-2, k v, heads 6-7\n"
        "3 -> 1  layer 3, k v, heads 6-7"
    )
    assert [programs[3, d].plan([0], [1]).nbytes for d in (0, 1)] == [3 * 2 * 16 * 2 * 256, 2 * 16 * 2 * 256]
    assert repr(programs) == "Resharding(4 to 2, 8 pairs)"
    assert repr(programs[3, 1]) == "PairProgram(layer 3, k v, heads 6-7)"


@pytest.mark.parametrize(("ranks", "heads"), [(8, 2), (4, 1), (8, 8), (6, 3)])
@pytest.mark.parametrize("blocks", [1, 5, 8])
def test_replicas_share_the_blocks_within_one_of_each_other(ranks, heads, blocks):
    sources = tp(SPLIT, ranks, heads)
    plans = kvplan.reshard(sources, rank(NHD, heads=range(heads))).plan(range(blocks), range(blocks))
    assert sum(plan.units for plan in plans.values()) == blocks * heads
    for group in range(heads):  # ranks of one head
        held = [plan.units for (s, _), plan in plans.items() if s * heads // ranks == group]
        assert max(held) - min(held) <= 1
        assert sum(held) == blocks


def test_a_pool_without_a_rank_that_holds_its_content_is_refused():
    four = tp(SPLIT, 4, 8)
    with pytest.raises(IncompatibleLayoutsError, match=r"no source holds layer 0 'k', heads 4-5, which destination 0"):
        kvplan.reshard([*four[:2], four[3]], rank(NHD, heads=range(8)))
    partial = kvplan.reshard([*four[:2], four[3]], rank(NHD, heads=range(8)), complete=False)
    assert sorted(partial) == [(0, 0), (1, 0), (2, 0)]
    with pytest.raises(IncompatibleLayoutsError, match=r"no source holds layer 1 'k', heads 0-7"):
        kvplan.reshard(four, rank(NHD, heads=range(8), layers=range(2)))
    ranks = [Shard(each, cp_rank=0, cp_size=2) for each in tp(SPLIT, 1, 2)]
    with pytest.raises(IncompatibleLayoutsError, match=r"tokens of context-parallel rank 1 of 2, which destination 0"):
        kvplan.reshard(ranks, rank(NHD, heads=range(2)))
    assert len(kvplan.reshard(ranks, rank(NHD, heads=range(2)), complete=False)) == 1
    with pytest.raises(LayoutError, match=r"2 ranks, 1 tokens at a time and 2 ranks, 2 tokens at a time"):
        kvplan.reshard([*ranks, Shard(ranks[0].layout, 1, 2, 2)], rank(NHD, heads=range(2)))


def test_destinations_that_share_bytes_are_refused():
    source = KVLayout.from_tensors("block token head dim", np.zeros((4, 2, 4, 8), np.int8))
    memory = np.zeros((4, 2, 4, 8), np.int8)
    pool = KVLayout.from_tensors("block token head dim", memory)
    left, right = pool.slice(heads=range(2)), pool.slice(heads=range(2, 4))
    assert len(kvplan.reshard(source, [left, right])) == 2
    with pytest.raises(OverlapError, match="destinations 0 and 1 share bytes"):
        kvplan.reshard(source, [left, pool.slice(heads=range(1, 3))])
    again = KVLayout.from_tensors("block token head dim", memory)
    with pytest.raises(OverlapError, match="destinations 0 and 2 share bytes"):
        kvplan.reshard(source, [left, right, again])
    apart = KVLayout.from_tensors("block token head dim", memory[:, :, 2:], head_start=2)
    assert len(kvplan.reshard(source, [left, apart])) == 2
    fewer = KVLayout.from_tensors("block token head dim", memory[1:])
    with pytest.raises(OverlapError, match="destinations 0 and 1 share bytes"):
        kvplan.reshard(source, [pool, fewer])
    rows = [KVLayout.from_tensors("block: token head dim", [memory[k] for k in ids]) for ids in ((0, 1), (1, 2, 3))]
    with pytest.raises(OverlapError, match="destinations 0 and 1 share bytes"):
        kvplan.reshard(source, rows)


def test_every_rank_refuses_what_one_of_them_would():
    """Ids of another rank's turn are checked, so that no rank writes its part of a transfer that others refuse."""
    sources = tp(SPLIT, 2, 1)
    programs = kvplan.reshard(sources, rank(NHD, heads=range(1)))
    for program in programs.values():
        with pytest.raises(BlockIndexError, match=r"src_blocks\[1\] is 8; src blocks are 0 to 7"):
            program.plan([0, 8], [0, 1])
        with pytest.raises(BlockIndexError, match=r"dst_blocks\[0\] is -1"):
            program.plan([0, 1], [-1, 1])
        with pytest.raises(OverlapError, match="name block 3 more than once"):
            program.plan([0, 1], [3, 3])
        with pytest.raises(BlockIndexError, match="2 src blocks cover 2 units, 1 dst blocks cover 1"):
            program.plan([0, 1], [3])
        assert program.plan([], []).nbytes == 0
    with pytest.raises(KeyError):
        programs[0, 1]
