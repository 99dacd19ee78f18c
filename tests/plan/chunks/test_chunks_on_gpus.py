"""Chunks on a simulated GPU: gathered from one cache, scattered to another, by each path of a GPU."""

from __future__ import annotations

import numpy as np
import pytest

import kvplan
from kvplan.plan.row_plans import Memory, layout_of
from tests.plan.chunks.rings import Half
from tests.simulated.drawn import executor, owned
from tests.simulated_driver import simulated

LAYERS, BLOCKS, TOKENS, DIM = 3, 400, 4, 32
SLOTS, SLOT_NBYTES = 8, 8192


@pytest.mark.parametrize("path", ["kernel", "copy_engine", "auto"])
@pytest.mark.parametrize("seed", range(4))
def test_chunks_of_many_units(path, seed):
    rng = np.random.default_rng(seed)
    source = rng.integers(0, 256, (LAYERS, BLOCKS, TOKENS, DIM), dtype=np.uint8)
    cache = np.zeros((BLOCKS, TOKENS, LAYERS, DIM), np.uint8)
    ring = np.zeros(SLOTS * SLOT_NBYTES + 256, np.uint8)
    here, there = (rng.permutation(BLOCKS)[:380].tolist() for _ in range(2))
    with simulated(1, seed) as driver:
        src = kvplan.KVLayout.from_tensors("layer block token dim", owned(driver, source))
        dst = kvplan.KVLayout.from_tensors("block token layer dim", owned(driver, cache))
        driver.own(ring, 0)
        layout = layout_of([Memory(ring.ctypes.data, ring.nbytes, "cuda:0", ring)])
        start = ring.ctypes.data + -ring.ctypes.data % 256
        plan = kvplan.compile(src, dst).plan(here, there)
        gathers, scatters = Half(plan, 0, SLOT_NBYTES), Half(plan, 1, SLOT_NBYTES)
        with executor(path) as made:
            last = None
            for k in range(len(gathers.cut.chunks)):
                slot = start + k % SLOTS * SLOT_NBYTES
                gathered = made.submit(gathers.plan(k, gathers.ids(k, 0), layout, slot), after=last)
                last = made.submit(scatters.plan(k, gathers.ids(k, 1), layout, slot), after=gathered)
            last.synchronize()
    expected = np.zeros_like(cache)
    expected[there] = source[:, here].transpose(1, 2, 0, 3)
    np.testing.assert_array_equal(cache, expected)
