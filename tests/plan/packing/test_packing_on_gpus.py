"""Chunks of packed plans on a simulated GPU: gathered from one cache, scattered to another, by each path of a GPU."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

import kvplan
from kvplan.plan.packing.chunk_half import Slot
from kvplan.plan.packing.packing import packing_of
from kvplan.plan.row_plans import Memory, layout_of
from tests.simulated import Device
from tests.simulated.executors import executor_on
from tests.simulated.objects import Tensor

LAYERS, BLOCKS, TOKENS, DIM = 3, 6, 4, 32


@pytest.mark.parametrize("order", ["src", "dst"])
@pytest.mark.parametrize("path", ["kernel", "copy_engine", "auto"])
@pytest.mark.parametrize("seed", range(3))
def test_chunks_of_one_gpu(path, order, seed):
    rng = np.random.default_rng(seed)
    device = Device(seed, eager=False)
    source = rng.integers(0, 256, (LAYERS, BLOCKS, TOKENS, DIM), dtype=np.uint8)
    cache = np.zeros((BLOCKS, TOKENS, LAYERS, DIM), np.uint8)
    ring = np.zeros(4096 + 256, np.uint8)
    for array in (source, cache, ring):
        device.own(array, 0)
    src = kvplan.KVLayout.from_tensors("layer block token dim", Tensor(source))
    dst = kvplan.KVLayout.from_tensors("block token layer dim", Tensor(cache))
    start = ring.ctypes.data + -ring.ctypes.data % 256
    layout = layout_of([Memory(ring.ctypes.data, ring.nbytes, "cuda:0", ring)])
    slots = [Slot(layout, start + k * 1024, 1024) for k in range(4)]
    here, there = rng.permutation(BLOCKS)[:5].tolist(), rng.permutation(BLOCKS)[:5].tolist()
    packing = packing_of(kvplan.compile(src, dst).plan(here, there), order, most=1024)
    cuts = packing.cuts(1024)
    last = None
    with executor_on(device, path) as executor:
        for k, (first, end) in enumerate(pairwise(cuts)):
            gathered = executor.submit(packing.gather(first, end, slots[k % 4]), after=last)
            last = executor.submit(packing.scatter(first, end, slots[k % 4]), after=gathered)
        device.run()
        assert last is not None
        last.synchronize()
    expected = np.zeros_like(cache)
    expected[there] = source[:, here].transpose(1, 2, 0, 3)
    np.testing.assert_array_equal(cache, expected)
