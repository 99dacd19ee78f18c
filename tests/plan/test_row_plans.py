"""Plans from addresses move what a loop over the rows moves."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvplan
from kvplan.execute.gpu.resources import Limits
from kvplan.plan.row_plans import Memory, RowProgram, layout_of
from tests.simulated import Device
from tests.simulated.executors import TIGHT, executor_on

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


PLACES = {"load": ("cpu", "cuda:0"), "store": ("cuda:0", "cpu"), "device": ("cuda:0", "cuda:0"),
          "pull": ("cuda:1", "cuda:0"), "push": ("cuda:0", "cuda:1")}  # fmt: skip
GPU_PATHS = [(route, path) for route in PLACES for path in ("auto", "copy_engine", "copy_engine_2d", "kernel", "staged")
             if path != "staged" or route in {"load", "store"}]  # fmt: skip


@pytest.mark.parametrize("tight", [False, True])
@pytest.mark.parametrize("sizes", [[48], [16, 48], list(range(1, 41))])
@pytest.mark.parametrize(("route", "path"), GPU_PATHS)
def test_every_path_of_a_gpu_moves_rows(route, path, sizes, tight):
    device = Device(5)
    rng = np.random.default_rng(len(sizes))
    src, dst = (rng.integers(0, 256, 1 << 13, np.uint8) for _ in range(2))
    for pool, place in zip((src, dst), PLACES[route], strict=True):
        if place == "cpu":
            device.pin(pool)
        else:
            device.own(pool, int(place[-1]))
    program = RowProgram(*(
        layout_of([Memory(pool.ctypes.data, pool.nbytes, place, pool)])
        for pool, place in zip((src, dst), PLACES[route], strict=True)
    ))  # fmt: skip
    with executor_on(device, path, limits=Limits(**TIGHT) if tight else Limits()) as executor:
        for turn in range(2):
            slots = rng.permutation(100)[:60]
            size = rng.choice(sizes, 60)
            rows = [
                (64 * int(source), 64 * int(slot), int(n))
                for source, slot, n in zip(rng.integers(0, 100, 60), slots, size, strict=True)
            ]
            wanted = moved((src, dst), rows)
            columns = np.array(rows, dtype=np.int64).T
            given = columns[2] if len(sizes) > 1 else sizes[0]
            alignment = 16 if len(sizes) < 3 else 1
            plan = program.plan(columns[0] + src.ctypes.data, columns[1] + dst.ctypes.data, given, alignment)
            result = executor.submit(plan).result()
            assert result.nbytes == plan.nbytes, turn
            np.testing.assert_array_equal(dst, wanted)
