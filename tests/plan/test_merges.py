"""Joints: which runs of a program can touch in different units; literal offsets, and the limits of the list."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvplan
from kvplan import KVLayout
from kvplan.plan import loops_numba
from kvplan.plan import merges as module
from kvplan.plan.merges import possible_merges
from tests.profiles import examples


def layout(notation: str, *shape: int) -> KVLayout:
    return KVLayout.from_tensors(notation, np.zeros(shape, np.uint8))


def found(src: KVLayout, dst: KVLayout) -> list[tuple[int, int, int, int, list[int]]] | None:
    made = possible_merges.__wrapped__(kvplan.compile(src, dst).program.groups)  # nothing of a changed limit is kept
    return None if made is None else [(*joint[:4], joint.ends.tolist()) for joint in made]


def test_a_run_that_meets_itself_in_the_next_unit_is_a_chain_and_no_joint():
    assert found(layout("block token dim", 4, 2, 8), layout("block token dim", 6, 2, 8)) == []


def test_runs_that_meet_only_within_one_unit_of_a_side_are_no_joint():
    """The first layer of the last block ends where the second layer of the first block begins, in the source.

    In the destination both lie in one block, and a plan writes that once.
    """
    assert found(layout("layer block dim", 2, 4, 8), layout("block layer dim", 6, 2, 8)) == []


def test_planes_meet_where_the_last_block_of_one_is_the_neighbour_of_the_first_of_the_next():
    """K planes of 4 and of 6 blocks: the end of block 3 is the start of V's block 0, and of block 5 in the other."""
    made = found(layout("kv block dim", 2, 4, 8), layout("kv block dim", 2, 6, 8))
    assert made == [(0, 0, 8 - 4 * 8, 8 - 6 * 8, [8])]


def test_joints_of_one_distance_between_units_are_one_with_all_their_ends():
    """Two layers, each of them a K plane and a V plane of 4 blocks, padded apart from the next layer."""
    sides = []
    for pitch in (80, 90):
        planes = np.zeros((2, pitch), np.uint8)[:, :64]
        shape, strides = (2, 2, 4, 8), (pitch, 32, 8, 1)
        sides.append(
            KVLayout.from_tensors("layer kv block dim", np.lib.stride_tricks.as_strided(planes, shape, strides))
        )
    assert found(*sides) == [(0, 0, 8 - 4 * 8, 8 - 4 * 8, [8, 8 + 90])]


def test_runs_of_different_groups_meet():
    """A part of 8 bytes a block, and behind its last block one of 4."""
    sides = []
    for blocks in (3, 5):
        memory = np.zeros(12 * blocks, np.uint8)
        parts = [memory[: 8 * blocks].reshape(blocks, 8), memory[8 * blocks :].reshape(blocks, 4)]
        sides.append(KVLayout.merge([KVLayout.from_tensors("block dim", part, part=name)
                                     for name, part in zip(("a", "b"), parts, strict=True)]))  # fmt: skip
    assert found(*sides) == [(0, 1, 8, 8, [8])]


def planes(pitch: int) -> KVLayout:
    """K and V of 4 blocks of 8 bytes, ``pitch`` bytes from plane to plane."""
    memory = np.zeros(pitch + 32, np.uint8)
    return KVLayout.from_tensors("kv block dim", np.lib.stride_tricks.as_strided(memory, (2, 4, 8), (pitch, 8, 1)))


@pytest.mark.parametrize("pitches", [(40, 40), (32, 40), (40, 32)])
def test_planes_that_lie_one_block_too_far_apart_on_a_side_never_meet(pitches):
    """The end of a fifth block would be the start of V; there are four."""
    assert found(*map(planes, pitches)) == []


def test_the_last_unit_of_the_last_block_meets_the_first_of_the_next_plane():
    """Blocks of two tokens in the source, of one in the destination."""
    made = found(layout("kv block token dim", 2, 4, 2, 8), layout("kv block token dim", 2, 12, 1, 8))
    assert made == [(0, 0, 8 - 8 * 8, 8 - 12 * 8, [8])]
    made = found(layout("kv block token dim", 2, 12, 1, 8), layout("kv block token dim", 2, 4, 2, 8))
    assert made == [(0, 0, 8 - 12 * 8, 8 - 8 * 8, [8])]


@pytest.mark.parametrize("src_order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("dst_order", [(0, 1), (1, 0)])
def test_blocks_that_are_looked_up_meet_in_whatever_order_they_are_numbered(src_order, dst_order):
    """Two blocks of 32 bytes, K the first 8 of each and V the last: V of the lower ends where K of the other begins."""
    sides = []
    for order in (src_order, dst_order):
        rows = np.zeros((2, 32), np.uint8)
        blocks = [np.lib.stride_tricks.as_strided(rows[k], (2, 8), (24, 1)) for k in order]
        sides.append(KVLayout.from_tensors("block: kv dim", blocks))
    assert found(*sides) == [(0, 0, 32, 32, [32])]


@pytest.mark.parametrize("moved", [0, 2])
def test_groups_whose_blocks_lie_between_one_another_s_meet(moved):
    """Rows of 4 bytes: one group's every 8 bytes, the other's every 16, from 12 on; wherever all of it begins."""
    sides = []
    for _ in range(2):
        memory = np.zeros(80, np.uint8)
        start = -memory.ctypes.data % 16 + moved
        parts = [memory[start : start + 24].reshape(3, 8)[:, :4], memory[start + 12 : start + 60].reshape(3, 16)[:, :4]]
        sides.append(KVLayout.merge([KVLayout.from_tensors("block dim", part, part=name)
                                     for name, part in zip(("a", "b"), parts, strict=True)]))  # fmt: skip
    # An a ends where the next b begins, and a b where the next a begins.
    assert found(*sides) == [(0, 1, 4, 4, [4]), (1, 0, 4, 4, [4])]


@pytest.mark.parametrize(("name", "most"), [("MAX_MERGES", 1), ("MAX_CANDIDATES", 4)])
def test_up_to_its_limit_everything_is_listed_and_past_it_nothing(monkeypatch, name, most):
    """One joint; as candidates the ends of both planes with the starts of both, as blocks are as long as their step."""
    sides = layout("kv block dim", 2, 4, 8), layout("kv block dim", 2, 6, 8)
    listed = found(*sides)
    assert listed
    with monkeypatch.context() as patch:
        patch.setattr(module, name, most)
        assert found(*sides) == listed
        patch.setattr(module, name, most - 1)
        assert found(*sides) is None


UNITS = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=3)


@examples(250)
@given(before=UNITS, after=UNITS, src=st.integers(-9, 9), dst=st.integers(-9, 9))
def test_units_can_meet_where_their_ranges_do_on_both_sides(before, after, src, dst):
    units = [np.array(side, np.int64).T.copy() for side in (before, after)]
    expected = True
    for column, gap in ((0, src), (1, dst)):
        moved, there = ({one[column] + by for one in side} for side, by in ((before, gap), (after, 0)))
        expected &= min(moved) <= max(there) and min(there) <= max(moved)
    for can_meet in (loops_numba.can_meet, loops_numba.can_meet.py_func):
        assert can_meet(*units, src, dst) == expected
