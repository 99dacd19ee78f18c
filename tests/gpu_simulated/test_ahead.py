"""Launches prepared ahead: the submit makes no copy, the bytes are the same, and every room is given back."""

from __future__ import annotations

import gc

import numpy as np
import pytest

import kvplan
from kvplan.engines.nixl.chosen_rows import chosen_rows
from kvplan.engines.nixl.descriptor_rows import Rows
from kvplan.execute.gpu.resources import Limits
from kvplan.plan import loops
from kvplan.plan.row_plans import Memory, RowProgram, layout_of
from tests.simulated import Device
from tests.simulated.executors import executor_on, open_executor

ROWS, SIZE = 64, 48
FEW = Limits(near_rows=2)


@pytest.fixture(autouse=True)
def _with_loops():
    loops.loops_for(1 << 20)


class Rig:
    """Two caches of a simulated GPU, or of two, with a list of rows of each."""

    def __init__(self, seed=0, there=1):
        rng = np.random.default_rng(seed)
        self.device = Device(seed)
        self.here, self.there = (rng.integers(0, 256, ROWS * SIZE, np.uint8) for _ in range(2))
        layouts = []
        for pool, ordinal in ((self.here, 0), (self.there, there)):
            self.device.own(pool, ordinal)
            layouts.append(layout_of([Memory(pool.ctypes.data, pool.nbytes, f"cuda:{ordinal}", pool)]))
        self.layouts = layouts
        self.lists = [Rows.of(np.array([[pool.ctypes.data, SIZE, 0, SIZE, ROWS]]), "VRAM")
                      for pool in (self.here, self.there)]  # fmt: skip
        self.read, self.write = RowProgram(*layouts[::-1]), RowProgram(*layouts)

    def chosen(self, executor, at, to, operation="READ"):
        return chosen_rows(operation, *self.lists, (at, to), executor)

    def plan(self, executor, at, to, operation="READ"):
        rows = self.chosen(executor, at, to, operation)
        return rows.plan(self.read if operation == "READ" else self.write, SIZE, 16)

    def wanted(self, at, to):
        found = self.here.copy().reshape(ROWS, SIZE)
        found[at] = self.there.reshape(ROWS, SIZE)[to]
        return found.ravel()


def rooms(executor):
    return executor._backend.rooms


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("there", [0, 1])
def test_a_submit_only_launches_and_may_be_repeated(seed, there):
    rig = Rig(seed, there)
    rng = np.random.default_rng(seed)
    with executor_on(rig.device, "kernel", limits=FEW) as executor:
        executor.submit(rig.plan(executor, [0, 1, 2], [3, 4, 5])).synchronize()  # uploads the run table
        for _ in range(6):
            at, to = rng.permutation(ROWS)[:20], rng.integers(0, ROWS, 20)
            wanted = rig.wanted(at, to)
            plan = rig.plan(executor, at, to)
            rig.device.calls.clear()
            for _ in range(2):
                result = executor.submit(plan).result()
                assert (result.nbytes, result.launches, result.path) == (20 * SIZE, 1, "kernel")
                np.testing.assert_array_equal(rig.here, wanted)
            assert "cuMemcpyAsync" not in rig.device.calls
            assert rig.device.calls.count("cuLaunchKernelEx") == 2
        rig.there[:], wanted = rig.here, rig.there.copy().reshape(ROWS, SIZE)
        executor.submit(rig.plan(executor, [1, 2, 3], [9, 8, 7], "WRITE")).synchronize()
        np.testing.assert_array_equal(rig.there.reshape(ROWS, SIZE)[[9, 8, 7]], rig.here.reshape(ROWS, SIZE)[[1, 2, 3]])


@pytest.mark.parametrize("path", ["kernel", "auto"])
def test_units_that_outlive_their_executor_can_be_read_and_are_then_freed(path):
    rig = Rig()
    executor = open_executor(rig.device, path, limits=FEW)
    plan = rig.plan(executor, range(9), range(9))
    executor.submit(plan).synchronize()
    wanted, left, part = plan.parts[0].units.copy(), rooms(executor), plan.parts[0].units[:, 2:]
    executor.close()
    rig.device.run()
    assert left.room(9) is None
    with pytest.raises(kvplan.TransferError, match="closed"):
        executor._backend.room(9)
    with pytest.raises(kvplan.TransferError, match="closed"):
        executor._backend.upload(plan.ahead, plan)
    with pytest.raises(kvplan.TransferError, match="closed"):
        executor.submit(plan)
    np.testing.assert_array_equal(plan.parts[0].units, wanted)
    with executor_on(rig.device, path, limits=FEW) as other:
        other.submit(plan).synchronize()
        del plan
        gc.collect()
        np.testing.assert_array_equal(part, wanted[:, 2:])
        del part
        gc.collect()
    assert not rig.device.memory


@pytest.mark.parametrize("path", ["copy_engine", "copy_engine_2d", "auto"])
def test_a_plan_with_a_room_goes_by_any_path(path):
    rig = Rig()
    with executor_on(rig.device, path, limits=FEW) as executor:
        wanted = rig.wanted(range(9), range(9, 18))
        executor.submit(rig.plan(executor, range(9), range(9, 18))).synchronize()
        np.testing.assert_array_equal(rig.here, wanted)


def test_a_plan_with_a_room_goes_by_another_executor_and_by_layer():
    rig = Rig()
    with executor_on(rig.device, "kernel", limits=FEW) as executor:
        other = open_executor(rig.device, "kernel", limits=Limits(near_rows=2, launch_rows=4))
        for k, one in enumerate((other, executor, other)):
            wanted = rig.wanted(range(k, 9), range(9 + k, 18))
            plan = rig.plan((executor, other, other)[k], range(k, 9), range(9 + k, 18))
            one.submit(plan, by_layer=k == 1).synchronize()
            np.testing.assert_array_equal(rig.here, wanted)
        assert plan.ahead.choice is None, "one launch has at most 4 rows"
        del plan
        other.close()


def test_an_upload_that_fails_leaves_a_plan_that_can_be_moved():
    rig = Rig()
    with executor_on(rig.device, "kernel", limits=FEW) as executor:
        executor.submit(rig.plan(executor, [0, 1, 2], [3, 4, 5])).synchronize()
        for call in ("cuMemcpyAsync", "cuEventRecord"):
            rig.device.fail(call)
            wanted = rig.wanted(range(9), range(9, 18))
            plan = rig.plan(executor, range(9), range(9, 18))
            assert plan.ahead.choice is None
            executor.submit(plan).synchronize()
            np.testing.assert_array_equal(rig.here, wanted)


@pytest.mark.parametrize("wrong", [[-1, 0, 1], [0, 1, ROWS], [0, 1, 1 << 32], [0, 1, 1 << 62], [-(1 << 63), 1, 2]])
def test_indices_out_of_range_are_found_on_either_side(wrong):
    rig = Rig()
    right = [0, 1, 2]
    with executor_on(rig.device, "kernel", limits=FEW) as executor:
        for at, to in ((wrong, right), (right, wrong)):
            assert rig.chosen(executor, at, to) is None
            assert rig.chosen(executor, np.array(at, np.int64), np.array(to, np.int64)) is None
        for at, to in (([], []), (right, right[:2]), ([right], [right]), ([0.0, 1.0, 2.0], right)):
            assert rig.chosen(executor, at, to) is None
        assert rig.chosen(executor, np.array([0, 1, 1 << 63], np.uint64), right) is None
    rig.device.run()


def test_indices_of_any_kind_are_copied():
    rig = Rig()
    fixed = np.arange(5)
    fixed.setflags(write=False)
    for at in (fixed, np.arange(5, dtype=np.int32), np.arange(10)[::2] // 2, np.arange(5, dtype=np.uint64), range(5)):
        rows = rig.chosen(None, at, np.arange(5)[::-1])
        assert rows.kept.tolist() == [[0, 1, 2, 3, 4], [4, 3, 2, 1, 0]]
        assert rows.pass_on(lambda note, one, other: (note, one.tolist(), other.dtype))(b"n") == (
            b"n", [0, 1, 2, 3, 4], np.int64)  # fmt: skip
    mine = np.arange(5)
    rows = rig.chosen(None, mine, mine)
    mine[:] = 7
    assert rows.kept.tolist() == [[0, 1, 2, 3, 4]] * 2
    assert (rows.units[1] - rig.here.ctypes.data).tolist() == [0, 48, 96, 144, 192]


@pytest.mark.parametrize("seed", range(30))
def test_addresses_are_those_of_the_lists_in_whatever_order(seed):
    rng = np.random.default_rng(seed)
    tables = []
    for _ in range(2):
        rows = int(rng.integers(1, 40))
        count = rng.integers(1, 300 if seed % 3 else 2, rows)
        stride = rng.integers(1, 1 << 20, rows)
        tables.append(np.stack([rng.integers(0, 1 << 40, rows), np.full(rows, 8), np.zeros(rows), stride, count], 1))
    lists = [Rows.of(table.astype(np.int64), "VRAM") for table in tables]
    size = int(rng.integers(1, 2000))
    chosen = [rng.integers(0, len(one), size) for one in lists]
    if seed % 2:
        chosen = [np.sort(one) for one in chosen]
    made = chosen_rows("WRITE", *lists, tuple(chosen), None)
    for k in range(2):
        assert made.kept[k].tolist() == chosen[k].tolist()
        assert made.units[k].tolist() == lists[k].addresses(chosen[k]).tolist()
