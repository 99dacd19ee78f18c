"""Plans between a pool and SGLang's staging ring on a simulated GPU, by each path of a GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvplan.engines.sglang.ring_plans import plan_of, planes_of, planes_of_rows
from kvplan.plan.row_plans import Memory, layout_of
from tests.plan.packing.rings import assert_aligned
from tests.simulated import Device
from tests.simulated.executors import executor_on

PLANES, PAGES, PAGE, HEADS, DIM = 4, 6, 2, 4, 32
PATHS = pytest.mark.parametrize("path", ["kernel", "copy_engine", "auto"])


def on(device, *arrays):
    """A layout over arrays of the simulated GPU."""
    for array in arrays:
        device.own(array, 0)
    return layout_of([Memory(array.ctypes.data, array.nbytes, "cuda:0", array) for array in arrays])


@PATHS
@pytest.mark.parametrize("offset", [0, 32, 5])
def test_heads_go_to_the_ring_and_back(path, offset):
    rng = np.random.default_rng(offset)
    device = Device(offset, eager=False)
    pool = [rng.integers(0, 256, (PAGES * PAGE, HEADS, DIM), dtype=np.uint8) for _ in range(PLANES)]
    other = [np.zeros((PAGES * PAGE, 2, DIM), np.uint8) for _ in range(PLANES)]
    ring = np.zeros(PLANES * PAGES * PAGE * 2 * DIM + 64, np.uint8)
    pool_layout, other_layout, ring_layout = on(device, *pool), on(device, *other), on(device, ring)
    here, there = rng.permutation(PAGES)[:5], rng.permutation(PAGES)[:5]
    address = ring.ctypes.data + offset

    def planned(step, arrays, layout, pages, head):
        tensors = [torch.from_numpy(array) for array in arrays]
        _, planes, _ = planes_of(tensors[: PLANES // 2], tensors[PLANES // 2 :], PAGE, head, 2)
        plan = plan_of(step, [one.part(step, pages, address) for one in planes], layout, ring_layout)
        assert_aligned(plan)
        assert plan.nbytes == PLANES * 5 * PAGE * 2 * DIM
        return plan

    with executor_on(device, path) as executor:
        gathered = executor.submit(planned("src", pool, pool_layout, here, 1))
        last = executor.submit(planned("dst", other, other_layout, there, 0), after=gathered)
        device.run()
        last.synchronize()
    for a, b in zip(pool, other, strict=True):
        paged, found = (x.reshape(PAGES, PAGE, -1, DIM) for x in (a, b))
        np.testing.assert_array_equal(found[there], paged[here][:, :, 1:3])
        assert not found[np.setdiff1d(np.arange(PAGES), there)].any()


@PATHS
def test_rows_of_latents_go_to_the_ring(path):
    rng = np.random.default_rng(0)
    device = Device(0, eager=False)
    pool = [rng.integers(0, 256, (9, width + 16), dtype=np.uint8) for width in (576, 576, 132)]
    ring = np.zeros(4 * (576 + 576 + 132), np.uint8)
    rows = np.array([8, 0, 5, 3])
    planes = planes_of_rows([x.ctypes.data for x in pool], [576, 576, 132], [592, 592, 148])
    pool_layout, ring_layout = on(device, *pool), on(device, ring)
    plan = plan_of("src", [one.part("src", rows, ring.ctypes.data) for one in planes], pool_layout, ring_layout)
    with executor_on(device, path) as executor:
        transfer = executor.submit(plan)
        device.run()
        transfer.synchronize()
    wanted = np.concatenate([x[rows, : x.shape[1] - 16].ravel() for x in pool])
    np.testing.assert_array_equal(ring, wanted)
