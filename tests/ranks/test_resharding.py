"""Law 6: n ranks to m and back is the identity; every destination byte has one writer; replicas share the work."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

import kvplan
from kvplan import BlockIndexError, IncompatibleLayoutsError, KVLayout, LayoutError, OverlapError, Shard
from tests.ranks.rank_specs import HND, NHD, SPLIT, rank, tp, written


def test_llama_70b_of_four_ranks_into_a_canonical_pool():
    """Runs and bytes of layouts.md section 4: 80 layers, 2 of 8 heads a rank."""
    ranks = tp(SPLIT, 4, 8, layers=range(80))
    for notation, runs, nbytes in ((NHD, 2560, 512), (HND, 5120, 256)):
        programs = kvplan.reshard(ranks, rank(notation, heads=range(8), layers=range(80)))
        assert sorted(programs) == [(0, 0), (1, 0), (2, 0), (3, 0)]
        for program in programs.values():
            (one,) = program.programs
            assert (one.runs, one.run_nbytes) == (runs, (nbytes, nbytes))
            plan = program.plan([3, 4], [0, 5])
            assert (plan.units, plan.nbytes) == (2, 2 * 1_310_720)
    head_major = tp("layer: kv block head token dim", 4, 8, layers=range(80))
    (one,) = kvplan.reshard(head_major, rank(HND, heads=range(8), layers=range(80)))[2, 0].programs
    assert (one.runs, one.run_nbytes) == (160, (8192, 8192))


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


def test_a_rank_of_replicas_moves_the_block_ids_of_its_number():
    latents = "layer: block token dim"
    sources = [rank(latents, heads=range(1), kv=False) for _ in range(3)]
    pool = rank("block layer token dim", heads=range(1), kv=False)
    program = kvplan.reshard(sources, pool)[1, 0]
    assert repr(program) == "PairProgram(layer 0, kv, blocks 1 modulo 3)"
    plan = program.plan([7, 6, 5, 4, 3], [0, 1, 4, 5, 7])  # 1, 4 and 7 leave 1
    start = pool.address(layer=0, part="kv")
    assert sorted((plan.descriptors().dst - start).tolist()) == [4096, 4 * 4096, 7 * 4096]
    assert sorted((plan.descriptors().src - sources[1].address(layer=0, part="kv")).tolist()) == [
        3 * 4096, 5 * 4096, 6 * 4096
    ]  # fmt: skip


def test_a_larger_block_is_one_replicas_whole():
    """Destination blocks of 64 tokens: the four units of one go together, whoever moves them."""
    sources = tp(SPLIT, 2, 1, blocks=16)
    pool = rank(NHD, heads=range(1), tokens=64, blocks=4)
    plans = kvplan.reshard(sources, pool).plan(range(11), [0, 1, 3], dst_skip=1)
    assert {pair: plan.units for pair, plan in plans.items()} == {(0, 0): 3, (1, 0): 8}
    held = {
        pair: {(at - pool.address(layer=0, part="k")) // (64 * 512) for at in written([plan])}
        for pair, plan in plans.items()
    }
    assert held == {(0, 0): {0}, (1, 0): {1, 3}}


def test_heads_held_by_some_only_are_split_from_those_held_by_two():
    """Ranks of heads 0-2 and 2-4: head 2 is on both, and moved in turn."""
    sources = [rank(SPLIT, heads=range(3)), rank(SPLIT, heads=range(2, 5))]
    programs = kvplan.reshard(sources, rank(NHD, heads=range(5)))
    assert repr(programs[0, 0]) == "PairProgram(layer 0, k v, heads 0-1; layer 0, k v, head 2, blocks 0 modulo 2)"
    assert repr(programs[1, 0]) == "PairProgram(layer 0, k v, head 2, blocks 1 modulo 2; layer 0, k v, heads 3-4)"
    plans = programs.plan([0, 1], [2, 3])
    assert [plan.nbytes for plan in plans.values()] == [5 * 2 * 16 * 256] * 2


def test_fused_and_split_parts_meet_and_replicated_scales_go_beside_dealt_heads():
    def cache(heads, notation="block kv token head dim"):
        sizes = {"block": 4, "kv": 2, "token": 4, "head": len(heads), "dim": 8}
        kv = KVLayout.from_spec({"notation": notation, "sizes": sizes, "dtype": "int8", "head_start": heads.start})
        flat = {"notation": "block token dim", "sizes": {"block": 4, "token": 4, "dim": 2}, "dtype": "int8",
                "part": "index", "address": 0x10000}  # fmt: skip
        return KVLayout.merge([kv, KVLayout.from_spec(flat)])

    programs = kvplan.reshard([cache(range(2)), cache(range(2, 4))], cache(range(4), "block token head (kv dim)"))
    assert [repr(program) for program in programs.values()] == [
        "PairProgram(layer 0, k v, heads 0-1; layer 0, index, blocks 0 modulo 2)",
        "PairProgram(layer 0, k v, heads 2-3; layer 0, index, blocks 1 modulo 2)",
    ]
    assert [p.nbytes for p in programs.plan([0, 1, 2], [1, 2, 3]).values()] == [3 * 128 + 8, 3 * 128 + 16]
    (alone,) = kvplan.reshard(cache(range(4)), cache(range(4), "block kv head token dim")).values()
    assert repr(alone) == "PairProgram(layer 0, k v index, heads 0-3)"
    assert len(alone.programs) == 1


@pytest.mark.parametrize(("interleave", "first"), [(1, [0, 2, 4, 6]), (2, [0, 1, 4, 5]), (4, [0, 1, 2, 3])])
def test_tokens_dealt_to_two_ranks_by_hand(interleave, first):
    """Blocks of 4 tokens on each of two ranks are blocks of 8 of the pool; rows of 8 bytes."""
    layout = {"notation": "block token dim", "dtype": "int8", "sizes": {"block": 4, "token": 4, "dim": 8}}
    ranks = [Shard(KVLayout.from_spec(layout), cp_rank=k, cp_size=2, interleave=interleave) for k in (0, 1)]
    pool = KVLayout.from_spec(layout | {"sizes": {"block": 4, "token": 8, "dim": 8}})
    programs = kvplan.reshard(ranks, pool)
    assert programs.unit_tokens == 8
    start = pool.address(layer=0, part="kv"), ranks[0].layout.address(layer=0, part="kv")
    for k in (0, 1):
        moves = written([programs[k, 0].plan([3], [1])])
        rows = {(at - start[0] - 64) // 8: (origin - start[1] - 96) // 8 for at, origin in moves.items()}
        assert rows == {token + (interleave if k else 0): slot for slot, token in enumerate(first)}
    assert str(programs).splitlines()[1] == "0 -> 0  layer 0, kv, tokens 0 of 2 of the source"


def test_two_ways_of_dealing_tokens_meet_where_a_token_is_on_both():
    layout = {"notation": "block token dim", "dtype": "int8", "sizes": {"block": 4, "token": 4, "dim": 8}}
    two, four = ([Shard(KVLayout.from_spec(layout), k, n, 1) for k in range(n)] for n in (2, 4))
    programs = kvplan.reshard(two, four)  # token t is on rank t % 2, and on rank t % 4
    assert sorted(programs) == [(0, 0), (0, 2), (1, 1), (1, 3)]
    moves = written([programs[1, 3].plan([0, 1], [2])])
    start = two[0].layout.address(layer=0, part="kv")
    rows = {(at - start) // 8: (origin - start) // 8 for at, origin in moves.items()}
    assert rows == {8: 1, 9: 3, 10: 5, 11: 7}  # tokens 3, 7, 11, 15


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


@pytest.mark.parametrize(
    ("given_sides", "said"),
    [
        (([], None), r"sources is \[\]; give a sequence"),
        ((None, []), r"destinations is \[\]"),
        ((7, None), "sources is 7"),
        (([None, 3], None), r"sources\[1\] is a int"),
    ],
)
def test_what_is_no_rank_is_refused(given_sides, said):
    one = rank(NHD, heads=range(1))
    sides = [one if side is None else side for side in given_sides]
    sides = [[one if each is None else each for each in side] if isinstance(side, list) else side for side in sides]
    with pytest.raises(LayoutError, match=said):
        kvplan.reshard(*sides)


@pytest.mark.parametrize(
    ("numbers", "said"),
    [
        ({"cp_rank": 2, "cp_size": 2}, "cp_rank is 2; with cp_size 2 it is 0 to 1"),
        ({"cp_rank": -1}, "cp_rank is -1"),
        ({"cp_size": 0}, "cp_size is 0"),
        ({"cp_size": True}, "cp_size is True"),
        ({"cp_size": 2, "interleave": 3}, "interleave is 3; it must divide the rank's block_tokens, 16"),
        ({"interleave": 1.5}, "interleave is 1.5"),
    ],
)
def test_numbers_of_a_shard_that_are_none(numbers, said):
    with pytest.raises(LayoutError, match=said):
        Shard(rank(NHD, heads=range(1)), **numbers)


def test_a_shard_of_what_has_no_tokens_or_no_layout_is_refused():
    state = KVLayout.from_spec(
        {"notation": "block dim", "sizes": {"block": 4, "dim": 8}, "dtype": "int8", "part": "state"}
    )
    assert str(Shard(state)) == str(state)
    with pytest.raises(LayoutError, match="content without token slots"):
        Shard(state, cp_size=2)
    with pytest.raises(LayoutError, match="a shard's layout is a int"):
        Shard(3)
    assert str(Shard(rank(NHD, heads=range(1)), 1, 2)).endswith("tokens 1 of 2, 1 at a time")


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


def test_work_of_many_replicas_is_spread_over_any_ids():
    sources = tp(SPLIT, 4, 1, blocks=64)
    ids = np.random.default_rng(3).permutation(64)[:40]
    plans = kvplan.reshard(sources, rank(NHD, heads=range(1), blocks=64)).plan(ids, ids)
    assert {s: plan.units for (s, _), plan in plans.items()} == Counter((ids % 4).tolist())
    assert list(plans) == [(k, 0) for k in range(4)]
