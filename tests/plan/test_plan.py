"""Plans: ids in every shape, skips, merging, seams, caps; literal numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kvplan
from kvplan import KVLayout
from tests import oracle


def tokens(num_blocks: int, block_tokens: int, dim: int = 8, notation: str = "block token dim", **kwargs) -> KVLayout:
    return KVLayout.from_tensors(notation, np.zeros((num_blocks, block_tokens, dim), np.uint8), **kwargs)


def units_of(plan, layout, side: int, unit_nbytes: int) -> list[int]:
    """Unit numbers of a plan on one side, from its factored form."""
    return ((plan.parts[0].units[side] - layout.regions[0].address) // unit_nbytes).tolist()


def test_the_worked_example_of_the_design():
    gpu, cpu = tokens(16, 16), tokens(4, 64)
    program = kvplan.compile(gpu, cpu)
    assert program.unit_tokens == 16
    plan = program.plan(list(range(11)), [0, 1, 3], dst_skip=1)
    assert plan.units == 11
    assert units_of(plan, cpu, 1, 128) == [1, 2, 3, 4, 5, 6, 7, 12, 13, 14, 15]
    assert units_of(plan, gpu, 0, 128) == list(range(11))
    back = kvplan.compile(cpu, gpu).plan([0, 1, 3], list(range(11)), src_skip=1)
    assert units_of(back, cpu, 0, 128) == [1, 2, 3, 4, 5, 6, 7, 12, 13, 14, 15]


def test_blocks_of_24_and_16_tokens():
    src, dst = tokens(4, 24), tokens(6, 16)
    plan = kvplan.compile(src, dst).plan([3, 1], [5, 0, 2], src_skip=1, dst_skip=1)
    assert units_of(plan, src, 0, 64) == [10, 11, 3, 4, 5]
    assert units_of(plan, dst, 1, 64) == [11, 0, 1, 4, 5]


IDS = [3, 0, 2]


@pytest.mark.parametrize(
    "ids",
    [
        IDS,
        tuple(IDS),
        range(3, 0, -1),
        np.array(IDS, np.int64),
        np.array(IDS, np.int32),
        np.array(IDS, np.uint8),
        np.array(IDS, np.uint64),
        np.array(IDS, ">i4"),
        np.array([3, 9, 0, 9, 2], np.int64)[::2],
        torch.tensor(IDS),
        torch.tensor(IDS, dtype=torch.int32),
        torch.tensor([3, 9, 0, 9, 2])[::2],
        [np.int32(3), 0, np.int64(2)],
    ],
    ids=lambda ids: f"{type(ids).__name__} {getattr(ids, 'dtype', '')}",
)
def test_ids_of_every_type(ids):
    src, dst = tokens(4, 4), tokens(4, 4)
    plan = kvplan.compile(src, dst).plan(ids, [1, 2, 3])
    assert units_of(plan, src, 0, 32) == list(ids)


def test_read_only_ids_are_fine_and_ids_are_read_once():
    ids = np.array(IDS)
    ids.setflags(write=False)
    src, dst = tokens(4, 4), tokens(4, 4)
    program = kvplan.compile(src, dst)
    mine = np.array([1, 2, 3])
    plan = program.plan(ids, mine)
    mine[:] = 0
    assert units_of(plan, dst, 1, 32) == [1, 2, 3]


def test_consecutive_blocks_merge_on_both_sides():
    one, two = tokens(8, 16, 64), tokens(8, 16, 64)
    d = kvplan.compile(one, two).plan([3, 4, 6, 0, 1], [0, 1, 2, 6, 7]).descriptors()
    assert sorted(d.size.tolist()) == [1024, 2048, 2048]


def test_the_k_plane_of_the_last_block_joins_the_v_plane_of_the_first():
    one, two = (KVLayout.from_tensors("kv block token dim", np.zeros((2, 4, 8, 16), np.uint8)) for _ in range(2))
    d = kvplan.compile(one, two).plan(range(4), range(4)).descriptors()
    assert d.size.tolist() == [2 * 4 * 8 * 16]
    assert len(kvplan.compile(one, two).plan([3, 1], [3, 1]).descriptors().size) == 4


def test_the_last_row_of_a_block_joins_the_first_of_the_next():
    hnd = KVLayout.from_tensors("block head token dim", np.zeros((8, 2, 4, 16), np.uint8))
    nhd = KVLayout.from_tensors("block token head dim", np.zeros((8, 4, 2, 16), np.uint8))
    program = kvplan.compile(hnd, nhd)
    assert program.runs == 8
    assert len(program.plan([2, 3, 4], [5, 6, 7]).descriptors().size) == 3 * 8 - 2
    assert len(program.plan([2, 3, 4], [5, 7, 6]).descriptors().size) == 3 * 8


def test_a_plan_joined_with_empty_ones_is_that_plan():
    program = kvplan.compile(tokens(8, 16, 64), tokens(8, 16, 64))
    moving, empty = program.plan([1, 2], [4, 5]), program.plan([], [])
    assert kvplan.join([empty, moving, empty]) is moving
    assert kvplan.join([empty, empty]) is empty


def test_seams_cut_what_would_merge():
    memory = np.zeros((8, 16, 64), np.uint8)
    start = memory.ctypes.data
    src = tokens(8, 16, 64)
    dst = KVLayout.from_tensors("block token dim", memory, seams=(start + 2 * 1024, start + 4 * 1024 + 100, start))
    assert dst.seams == (start, start + 2048, start + 4196)
    plan = kvplan.compile(src, dst).plan(range(8), range(8))
    d = plan.descriptors()
    assert sorted((d.dst - start).tolist()) == [0, 2048, 4196]
    assert sorted(d.size.tolist()) == [2048, 2148, 3996]
    assert oracle.strided_moves(plan.strided()) == oracle.byte_moves(d)
    reverse = kvplan.compile(dst, src).plan(range(8), range(8))
    assert sorted((reverse.descriptors().src - start).tolist()) == [0, 2048, 4196]


def test_a_cap_cuts_from_the_front():
    plan = kvplan.compile(tokens(8, 16, 64), tokens(8, 16, 64)).plan(range(4), range(4))
    assert plan.descriptors(max_nbytes=1500).size.tolist() == [1500, 1500, 1096]
    assert plan.descriptors(max_nbytes=4096).size.tolist() == [4096]


def test_strided_rows_by_name():
    src = KVLayout.from_tensors("layer: block token dim", list(np.zeros((3, 8, 4, 16), np.uint8)))
    dst = KVLayout.from_tensors("block layer token dim", np.zeros((8, 3, 4, 16), np.uint8))
    rows = kvplan.compile(src, dst).plan([5, 1], [0, 7]).strided()
    assert rows.shape == (2, 6)
    assert rows.dtype == np.int64
    assert rows.src.tolist() == [src.address(layer=0, part="kv", block=b) for b in (5, 1)]
    assert rows.dst.tolist() == [dst.address(layer=0, part="kv", block=b) for b in (0, 7)]
    assert [rows.width[0], rows.height[0], rows.src_pitch[0], rows.dst_pitch[0]] == [64, 3, 512, 64]


# ---- fast paths next to their slow twins ------------------------------------------------------------------------


def test_strided_rows_of_a_destination_that_runs_backwards():
    memory = np.zeros((3, 4, 8), np.uint8)
    src = KVLayout.from_tensors("layer: block dim", list(np.zeros((3, 4, 8), np.uint8)))
    dst = KVLayout.from_tensors("layer: block dim", [memory[k] for k in (2, 1, 0)])
    plan = kvplan.compile(src, dst).plan([1, 3], [0, 2])
    assert min(loop[2] for part in plan.parts for run in part.group.runs for loop in run.loops) < 0
    assert oracle.strided_moves(plan.strided()) == oracle.byte_moves(plan.descriptors())
    assert (plan.strided().height == 1).all()


@given(ids=st.lists(st.integers(0, 5) | st.integers(60, 68) | st.integers(0, 199), min_size=1, max_size=8),
       units=st.sampled_from((1, 2, 3)))  # fmt: skip
def test_a_block_named_twice_is_refused_and_leaves_nothing_for_the_next_plan(ids, units):
    sides = [KVLayout.from_tensors("block token dim", np.zeros((200, tokens, 1), np.uint8)) for tokens in (1, units)]
    program = kvplan.compile(*sides)
    again = [block for at, block in enumerate(ids) if block in ids[:at]]
    if again:
        with pytest.raises(kvplan.OverlapError, match=f"name block {again[0]} .*more than once"):
            program.plan(range(len(ids) * units), ids)
    once = list(dict.fromkeys(ids))
    assert program.plan(range(len(once) * units), once).units == len(once) * units
