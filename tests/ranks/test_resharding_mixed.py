"""Ranks that are not alike: states beside heads, heads named on some only, blocks of several sizes, tables, skips."""

from __future__ import annotations

import numpy as np
import pytest

import kvplan
from kvplan import BlockIndexError, Groups, IncompatibleLayoutsError, KVLayout, OverlapError, Shard
from tests.oracle import byte_moves
from tests.ranks.mixed_ranks import held_bytes


def kv(heads=range(4), tokens=16, **more):
    shape = (8, 2, tokens, len(heads), 8)
    return KVLayout.from_tensors("block kv token head dim", np.zeros(shape, np.int8), head_start=heads.start, **more)


def state(**more):
    return KVLayout.from_tensors("block dim", np.zeros((8, 24), np.int8), part="state", **more)


def latent(**more):
    return KVLayout.from_tensors("block token dim", np.zeros((8, 4, 8), np.int8), **more)


def test_a_state_beside_dealt_heads_is_moved_in_turn():
    """Destination blocks 3, 4, 5: rank 0 moves the state of 4, rank 1 those of 3 and 5, of 24 bytes each."""
    ranks = [KVLayout.merge([kv(heads), state()]) for heads in (range(2), range(2, 4))]
    programs = kvplan.reshard(ranks, KVLayout.merge([kv(), state()]))
    assert repr(programs[1, 0]) == "PairProgram(layer 0, k v, heads 2-3; layer 0, state, blocks 1 modulo 2)"
    plans = programs.plan([0, 1, 2], [3, 4, 5])
    assert [plan.nbytes for plan in plans.values()] == [3 * 512 + 24, 3 * 512 + 2 * 24]


def test_a_state_has_no_common_unit_with_another_block_size():
    ranks = [KVLayout.merge([kv(heads), state()]) for heads in (range(2), range(2, 4))]
    with pytest.raises(
        IncompatibleLayoutsError, match="layer 0 'state' moves whole blocks, but blocks hold 16 tokens in"
    ):
        kvplan.reshard(ranks, KVLayout.merge([kv(tokens=64), state()]))


def test_a_state_is_not_entered_in_the_middle():
    """Another rank has blocks of 8 tokens, so that skips count half a block of these."""
    first, other = KVLayout.merge([kv(), state()]), kv(tokens=8, layer_start=1)
    whole = KVLayout.merge([kv(), state(), kv(layer_start=1)])
    programs = kvplan.reshard([first, other], whole)
    assert programs.unit_tokens == 8
    with pytest.raises(
        BlockIndexError, match="dst_skip is 1; layer 0 'state' has no token slots and moves whole blocks"
    ):
        programs[0, 0].plan([0], [1], 0, 1)
    assert programs[0, 0].plan([0], [1]).nbytes == 2 * 16 * 4 * 8 + 24
    assert programs[1, 0].plan([2], [1], 0, 1).nbytes == 2 * 8 * 4 * 8


def test_a_rank_of_nothing_but_a_state_pages_as_the_other_side_does():
    programs = kvplan.reshard([kv(), state()], KVLayout.merge([kv(), state()]))
    assert (programs.unit_tokens, programs[1, 0].spans) == (16, (16, 16))
    assert [plan.nbytes for plan in programs.plan([0, 1], [3, 4]).values()] == [2 * 1024, 2 * 24]
    back = kvplan.reshard(KVLayout.merge([kv(), state()]), [kv(), state()])
    assert [plan.nbytes for plan in back.plan([0, 1], [3, 4]).values()] == [2 * 1024, 2 * 24]
    finer = kvplan.reshard([KVLayout.merge([kv(), state()]), kv(tokens=8, layer_start=1)], [kv(), state()])
    assert (finer.unit_tokens, finer[0, 1].spans) == (8, (16, 16))
    assert finer[0, 1].plan([0, 1], [3, 4]).nbytes == 2 * 24
    only = kvplan.reshard([state(), kv(layer_start=1)], [state(), kv(layer_start=1)])
    assert only[0, 0].plan([0, 1, 2], [3, 4, 5]).nbytes == 3 * 24
    groups = Groups([programs[1, 0], only[0, 0]])
    assert groups.plan([[4], [5]], [[6], [7]], src_first=[4, 5]).nbytes == 2 * 24


@pytest.mark.parametrize("number", [0, 2])
def test_one_head_is_the_same_without_a_head_axis(number):
    headed = KVLayout.from_tensors("block token head dim", np.zeros((8, 4, 1, 8), np.int8), head_start=number)
    for pair in ((latent(), headed), (headed, latent())):
        (program,) = kvplan.reshard(*pair).values()
        assert program.plan([1], [2]).nbytes == 32
    programs = kvplan.reshard([latent(), headed], latent())
    assert [plan.nbytes for plan in programs.plan([0, 1, 2], [3, 4, 5]).values()] == [32, 64]


def test_several_heads_without_a_head_axis_are_refused():
    """Both would be copied as if they were the same."""
    two = [KVLayout.from_tensors("block token head dim", np.zeros((8, 4, 1, 8), np.int8), head_start=k) for k in (0, 1)]
    eight = KVLayout.from_tensors("block token head dim", np.zeros((8, 4, 8, 8), np.int8))
    for pair, heads in (((two, latent()), "0-1"), ((latent(), two), "0-1"), ((latent(), eight), "0-7")):
        said = f"layer 0 'kv' has heads {heads} on some ranks and no head axis on others; name the heads on all"
        with pytest.raises(IncompatibleLayoutsError, match=said):
            kvplan.reshard(*pair)


@pytest.mark.parametrize(
    ("notations", "moves"),
    [
        (("block head.0 token head.1 dim", "block token head dim"), 1),  # heads 1-4 are a slice of the destination
        (("block token head dim", "block head.0 token head.1 dim"), 1),  # of the source
        (("block head.0 token head.1 dim", "block token head.0 dim head.1"), 2),  # of neither: 1-2, and 3-4
    ],
)
def test_heads_that_a_split_axis_cannot_give(notations, moves):
    """Of six heads, kept as 2 x 3, the first and the last are on another rank, too; an index goes with the others."""

    def six(notation):
        sizes = {"block": 4, "token": 2, "head": 6, "head.0": 2, "head.1": 3, "dim": 2}
        heads = KVLayout.from_tensors(notation, np.zeros([sizes[dim] for dim in notation.split()], np.int8))
        index = KVLayout.from_tensors("block token dim", np.zeros((4, 2, 2), np.int8), part="index")
        return KVLayout.merge([heads, index])

    ends = [
        KVLayout.from_tensors("block token head dim", np.zeros((4, 2, 1, 2), np.int8), head_start=k) for k in (0, 5)
    ]
    ranks, pool = [six(notations[0]), *ends], six(notations[1])
    programs = kvplan.reshard(ranks, pool)
    assert [share.heads for share in programs[0, 0].shares] == [range(1), range(1, 5), range(5, 6)]
    assert len(programs[0, 0].programs) == 2 + moves
    wanted = held_bytes(Shard(pool), [2, 3], 0, 4)
    seen = []
    for (s, _), plan in programs.plan([0, 1], [2, 3]).items():
        held = held_bytes(Shard(ranks[s]), [0, 1], 0, 4)
        for to, origin in byte_moves(plan.descriptors()).items():
            assert held[origin][0] == wanted[to][0]
            seen.append(to)
    assert sorted(seen) == sorted(wanted)


def test_a_fused_destination_wants_both_k_and_v_of_a_head():
    rows = {"block": 4, "token": 2, "dim": 8}
    k, v = (
        KVLayout.from_spec({"notation": "block token head dim", "sizes": rows | {"head": heads}, "dtype": "int8",
                            "part": part, "address": address})
        for part, heads, address in (("k", 4, 0x1000), ("v", 2, 0x8000))
    )  # fmt: skip
    fused = KVLayout.from_spec(
        {"notation": "block token head dim", "sizes": rows | {"head": 4, "dim": 16}, "dtype": "int8"}
    )
    with pytest.raises(IncompatibleLayoutsError, match=r"no source holds layer 0 'kv', heads 2-3"):
        kvplan.reshard(KVLayout.merge([k, v]), fused)


def test_a_rank_that_wants_no_other_tokens_needs_no_other_rank():
    """Rank to rank, dealt alike; and tokens of rank 1 of 2, which are those of 1 and 3 of 4."""
    (program,) = kvplan.reshard(Shard(latent(), 1, 2), Shard(latent(), 1, 2)).values()
    assert program.plan([3], [4]).nbytes == 32
    assert len(kvplan.reshard([Shard(latent(), k, 4) for k in (1, 3)], Shard(latent(), 1, 2))) == 2
    with pytest.raises(
        IncompatibleLayoutsError, match="tokens of context-parallel rank 3 of 4, which destination 0 holds"
    ):
        kvplan.reshard(Shard(latent(), 1, 4), Shard(latent(), 1, 2))


def test_skips_that_shift_two_ways_of_dealing_are_refused():
    """Rounds of 8 tokens on both sides; a third rank has blocks of 4, so that skips count 4 tokens."""
    sources = [Shard(latent(), k, 2, 4) for k in (0, 1)]
    programs = kvplan.reshard(sources, [*(Shard(latent(), k, 2, 4) for k in (0, 1)), latent()])
    assert programs.unit_tokens == 4
    for k in (0, 1):
        with pytest.raises(BlockIndexError, match="would begin 4 tokens apart, but they deal tokens"):
            programs[k, k].plan([0, 1], [2, 3], 1, 0)
        assert programs[k, k].plan([0, 1], [2, 3], 1, 1).nbytes == (32 if k == 0 else 64)
        assert programs[k, 2].plan([0, 1], [2, 3, 4], 1, 0).nbytes == (32 if k == 0 else 64)


def test_tables_of_different_lengths_that_lie_apart_are_two_destinations():
    memory = np.zeros((6, 4, 8), np.int8)

    def pages(*ids):
        return KVLayout.from_tensors("block: token dim", [memory[k] for k in ids])

    assert len(kvplan.reshard(latent(), [pages(0, 2), pages(1, 3, 4)])) == 2
    with pytest.raises(OverlapError, match="destinations 0 and 1 share bytes"):
        kvplan.reshard(latent(), [pages(0, 2), pages(1, 3, 2)])
    strided = KVLayout.from_tensors("block token dim", memory[4:])
    assert len(kvplan.reshard(latent(), [pages(0, 2, 3), strided])) == 2
    with pytest.raises(OverlapError, match="destinations 0 and 1 share bytes"):
        kvplan.reshard(latent(), [pages(0, 2, 5), strided])


def test_a_rank_plans_alone_what_it_would_among_all():
    """Its own tensors and the pool are real; the others are described, by what they hold."""

    def real(k):
        return KVLayout.from_tensors(
            "layer: kv block token head dim", [np.zeros((2, 8, 4, 1, 8), np.int8) for _ in range(2)], head_start=k // 2
        )

    def elsewhere(k):
        sizes = {"layer": 2, "kv": 2, "block": 8, "token": 4, "head": 1, "dim": 8}
        return KVLayout.from_spec(
            {"notation": "block layer kv token head dim", "sizes": sizes, "dtype": "int8", "head_start": k // 2}
        )

    ranks = [real(k) for k in range(4)]
    pool = KVLayout.from_tensors("block layer kv head token dim", np.zeros((8, 2, 2, 2, 8, 8), np.int8))
    everything = kvplan.reshard(ranks, pool).plan(range(7), [6, 3, 1, 0], dst_skip=1)
    for k, rank in enumerate(ranks):
        alone = kvplan.reshard([rank if k == n else elsewhere(n) for n in range(4)], pool)
        plan = alone[k, 0].plan(range(7), [6, 3, 1, 0], dst_skip=1)
        assert byte_moves(plan.descriptors()) == byte_moves(everything[k, 0].descriptors())
