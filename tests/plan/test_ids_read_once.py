"""Block ids are read once: a thread that changes its array while a plan is made changes nothing that was checked."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

import kvplan
from kvplan.engines.slots import slot_array
from kvplan.engines.vllm.jobs import ids_of
from kvplan.errors import BlockIndexError
from kvplan.plan import loops_numpy, placing_numba
from kvplan.plan.loops_numpy import DST_OUTSIDE, PLACED, SRC_OUTSIDE, TWICE
from kvplan.plan.placement import block_ids, own_block_ids, sides

FAR = 10**12  # what the other thread writes; no block


class Changed:
    """Ids of another thread, which writes something else over each one as soon as it has been read."""

    def __init__(self, ids):
        self.ids = list(ids)
        self.size = len(self.ids)

    def __getitem__(self, at):
        found, self.ids[at] = self.ids[at], FAR
        return found

    def copy(self):
        return np.array([self[at] for at in range(self.size)], dtype=np.int64)


def cache(blocks, tokens, table=False):
    tensors = np.zeros((blocks, tokens, 8), np.uint8)
    if table:
        return kvplan.KVLayout.from_tensors("block: token dim", [tensor.copy() for tensor in tensors])
    return kvplan.KVLayout.from_tensors("block token dim", tensors)


@pytest.fixture(params=["compiled", "numpy"])
def place_units(request, monkeypatch):
    """The loop that places units, as Python runs it, so that an object can stand for the other thread's array."""
    if request.param == "numpy":
        return loops_numpy.place_units
    for name in ("_copy_outside", "_twice", "_twice_blocks", "_place_side"):
        monkeypatch.setattr(placing_numba, name, getattr(placing_numba, name).py_func)
    return placing_numba.place_units.py_func


def place(place_units, src, dst, src_ids, dst_ids, skips=(0, 0)):
    program = kvplan.compile(src, dst)
    here, there = sides(program.program)
    count = min(len(src_ids) * here.units - skips[0], len(dst_ids) * there.units - skips[1])
    out = np.empty((here.axes.shape[0], 2, count), np.int64)
    seen = np.zeros(there.num_blocks * there.units // 64 + 1, np.uint64)
    found = place_units(
        Changed(src_ids), Changed(dst_ids), *skips, here.axes, there.axes, here.tables, there.tables,
        here.num_blocks, there.num_blocks, seen, out,
    )  # fmt: skip
    assert not seen.any()
    return found, out


@pytest.mark.parametrize("table", [False, True], ids=["strided", "table"])
@pytest.mark.parametrize(("tokens", "dst_ids", "skip"), [(4, [5, 0, 7], 0), (16, [6], 1), (16, [6], 0)])
def test_what_was_read_first_is_placed(place_units, table, tokens, dst_ids, skip):
    src, dst = cache(8, 4, table), cache(8, tokens, table)
    (kind, _), out = place(place_units, src, dst, [3, 1, 2], dst_ids, (0, skip))
    assert kind == PLACED
    where = {"layer": 0, "part": "kv"}
    assert out[0, 0].tolist() == [src.address(block=block, **where) for block in (3, 1, 2)]
    units = [(dst_ids[k], 0) for k in range(3)] if tokens == 4 else [(6, 4 * (skip + k)) for k in range(3)]
    assert out[0, 1].tolist() == [dst.address(block=block, token=token, **where) for block, token in units]


def test_what_was_read_first_is_what_is_refused(place_units):
    src, dst = cache(8, 4), cache(8, 4)
    (kind, at), out = place(place_units, src, dst, [3, 8, 2], [0, 1, 2])
    assert (kind, at, out[0, 0, at]) == (SRC_OUTSIDE, 1, 8)
    (kind, at), out = place(place_units, src, dst, [3, 1, 2], [0, 1, -5])
    assert (kind, at, out[0, 1, at]) == (DST_OUTSIDE, 2, -5)
    (kind, at), _ = place(place_units, src, dst, [3, 1, 2], [4, 1, 4])
    assert (kind, at) == (TWICE, 4)


@pytest.mark.parametrize("blocks", [1, 8, 2**62])
@pytest.mark.parametrize("wrong", [-1, -(2**63), "blocks", 2**63 - 1])
def test_every_id_that_is_no_block_is_found(blocks, wrong):
    wrong = blocks if wrong == "blocks" else wrong
    row = np.empty(9, np.int64)
    for at in range(9):
        ids = np.full(9, blocks - 1, np.int64)
        ids[0] = 0
        assert placing_numba._copy_outside(ids, blocks, row) == -1
        assert row.tolist() == ids.tolist()
        ids[at] = wrong
        assert placing_numba._copy_outside(ids, blocks, row) == at


def test_the_message_names_the_id_that_was_refused():
    program = kvplan.compile(cache(8, 4), cache(8, 4))
    with pytest.raises(BlockIndexError, match=r"src_blocks\[1\] is 8; src blocks are 0 to 7"):
        program.plan(np.array([0, 8]), np.array([1, 2]))
    with pytest.raises(BlockIndexError, match=r"dst_blocks\[0\] is -1; dst blocks are 0 to 7"):
        program.plan(np.array([0, 7]), np.array([-1, 2]))


def test_planning_leaves_the_caller_s_ids_as_they_are():
    src_ids, dst_ids = np.array([3, 1]), np.array([5, 6])
    kvplan.compile(cache(8, 4), cache(8, 4)).plan(src_ids, dst_ids)
    assert (src_ids.tolist(), dst_ids.tolist()) == ([3, 1], [5, 6])


def test_ids_that_are_read_more_than_once_are_copied():
    ids = np.arange(4)
    assert block_ids(ids, "ids") is ids
    assert not np.shares_memory(own_block_ids(ids, "ids"), ids)
    assert not np.shares_memory(slot_array(ids, "slots"), ids)
    device = SimpleNamespace(block_ids=ids, group_sizes=[4], block_indices=[0])
    group = ids_of(device, SimpleNamespace(block_ids=ids), groups=1, blocks_per_chunk=1)[0]
    assert not np.shares_memory(group.blocks, ids)
    assert not np.shares_memory(group.chunks, ids)
    listed = own_block_ids([1, 2], "ids")
    assert listed.flags.owndata


@pytest.mark.parametrize("dtype", [np.int32, np.uint64, np.int64])
def test_ids_of_a_resharding_are_copied_before_they_are_looked_at(monkeypatch, dtype):
    """What checks and what plans see one array, which the caller has not."""
    seen = []
    given = np.array([1, 2], dtype)
    programs = kvplan.reshard(cache(8, 4), cache(8, 4))
    real = kvplan.CopyProgram.plan
    monkeypatch.setattr(kvplan.CopyProgram, "plan", lambda self, *ids: seen.append(ids) or real(self, *ids))
    programs[0, 0].plan(given, given)
    assert seen
    assert not any(np.shares_memory(ids, given) for ids in seen[0][:2])
