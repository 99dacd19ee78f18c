"""Ranks that are not alike: states beside heads, heads named on some only, blocks of several sizes, tables, skips."""

from __future__ import annotations

import numpy as np
import pytest

import kvplan
from kvplan import BlockIndexError, IncompatibleLayoutsError, KVLayout, Shard


def kv(heads=range(4), tokens=16, **more):
    shape = (8, 2, tokens, len(heads), 8)
    return KVLayout.from_tensors("block kv token head dim", np.zeros(shape, np.int8), head_start=heads.start, **more)


def state(**more):
    return KVLayout.from_tensors("block dim", np.zeros((8, 24), np.int8), part="state", **more)


def latent(**more):
    return KVLayout.from_tensors("block token dim", np.zeros((8, 4, 8), np.int8), **more)


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
