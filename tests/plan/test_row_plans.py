"""Plans from addresses move what a loop over the rows moves."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvplan
from kvplan.plan.row_plans import Memory, RowProgram, layout_of
from tests.simulated.drawn import PATHS, PLACES
from tests.simulated.drawn import executor as gpu_executor
from tests.simulated_driver import simulated

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


@pytest.mark.parametrize("count", [60, 1200])  # more rows are uploaded to the GPU, and need many calls
@pytest.mark.parametrize("sizes", [[48], [16, 48], list(range(1, 41))])
@pytest.mark.parametrize("path", ["auto", *PATHS])
def test_every_path_of_a_gpu_moves_rows(path, sizes, count):
    rng = np.random.default_rng(len(sizes))
    for places in PLACES.values():
        if path == "staged" and None not in places:
            continue
        src, dst = (rng.integers(0, 256, 64 * (count + 20), np.uint8) for _ in range(2))
        with simulated(2, 5) as driver, gpu_executor(path, staging_bytes=1 << 16) as made:
            layouts = []
            for pool, place in zip((src, dst), places, strict=True):
                if place is None:
                    driver.pin(pool)
                else:
                    driver.own(pool, place)
                name = "cpu" if place is None else f"cuda:{place}"
                layouts.append(layout_of([Memory(pool.ctypes.data, pool.nbytes, name, pool)]))
            program = RowProgram(*layouts)
            for _ in range(2):
                at, to = rng.integers(0, count, count), rng.permutation(count + 20)[:count]
                size = rng.choice(sizes, count)
                wanted = moved((src, dst), zip(64 * at, 64 * to, size, strict=True))
                nbytes, alignment = (size if len(sizes) > 1 else sizes[0]), (16 if len(sizes) < 3 else 1)
                plan = program.plan(64 * at + src.ctypes.data, 64 * to + dst.ctypes.data, nbytes, alignment)
                assert made.submit(plan).result().nbytes == plan.nbytes
                np.testing.assert_array_equal(dst, wanted)
            del plan, program
