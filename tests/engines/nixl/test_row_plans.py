"""Plans from addresses move what a loop over the rows moves."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvplan
from kvplan.engines.nixl.row_plans import Memory, RowProgram, layout_of
from kvplan.execute.host import tasks

SIZE = 1 << 14


@pytest.fixture(scope="module")
def executor():
    with kvplan.Executor() as made:
        yield made


def pools(seed, size=SIZE):
    rng = np.random.default_rng(seed)
    made = [rng.integers(0, 256, size, np.uint8) for _ in range(2)]
    return made, RowProgram(*(layout_of([Memory(pool.ctypes.data, pool.nbytes, "cpu", pool)]) for pool in made))


def moved(pools, rows):
    wanted = pools[1].copy()
    for src, dst, size in rows:
        wanted[dst : dst + size] = pools[0][src : src + size]
    return wanted


@given(
    st.integers(0, 4).flatmap(
        lambda power: st.tuples(
            st.just(1 << power),
            st.lists(st.tuples(st.integers(0, 60), st.sampled_from([1, 2, 3, 8])), min_size=1, max_size=30),
        )
    ),
    st.randoms(use_true_random=False),
)
def test_rows_of_any_size_and_alignment(executor, drawn, random):
    alignment, pairs = drawn
    (src, dst), program = pools(alignment)
    slots = random.sample(range(SIZE // (8 * alignment)), len(pairs))  # no destination twice
    rows = [
        (alignment * source, 8 * alignment * slot, alignment * size)
        for (source, size), slot in zip(pairs, slots, strict=True)
    ]
    wanted = moved((src, dst), rows)
    columns = np.array(rows, dtype=np.int64).T
    sizes = columns[2]
    size = int(sizes[0]) if len(set(sizes.tolist())) == 1 else sizes
    plan = program.plan(columns[0] + src.ctypes.data, columns[1] + dst.ctypes.data, size, alignment)
    assert plan.nbytes == sizes.sum()
    flat = plan.descriptors()
    assert flat.size.sum() == plan.nbytes
    executor.submit(plan).synchronize(600)
    np.testing.assert_array_equal(dst, wanted)


def test_rows_longer_than_a_task_and_a_destination_that_is_named_twice(executor, monkeypatch):
    monkeypatch.setattr(tasks, "TASK_NBYTES", 64)
    (src, dst), program = pools(1)
    rows = [(0, 512, 256), (512, 1024, 256), (512, 1024, 256), (768, 1280, 256)]
    wanted = moved((src, dst), rows)
    columns = np.array(rows, dtype=np.int64).T
    plan = program.plan(columns[0] + src.ctypes.data, columns[1] + dst.ctypes.data, 256, 16)
    executor.submit(plan).synchronize(600)
    np.testing.assert_array_equal(dst, wanted)


def test_a_layout_of_many_ranges_keeps_their_owners():
    pools = [np.zeros(100 + k, np.uint8) for k in range(40)]
    layout = layout_of([Memory(pool.ctypes.data, pool.nbytes, "cpu", pool) for pool in pools])
    assert (layout.device, layout.addresses, layout.writable) == ("cpu", "memory", True)
    assert {(r.address, r.nbytes) for r in layout.regions} == {(p.ctypes.data, p.nbytes) for p in pools}
    assert {id(region.owner.owner) for region in layout.regions} == {id(pool) for pool in pools}
