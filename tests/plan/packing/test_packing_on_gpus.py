"""Chunks of packed plans on a simulated GPU: gathered from one cache, scattered to another, by each path of a GPU."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import kvplan
from kvplan.agents.packed import pack_rows
from kvplan.execute.gpu.resources import DEFAULT_LIMITS
from kvplan.plan.packing.chunk_half import ChunkPlan, Slot
from kvplan.plan.packing.packing import packing_of
from kvplan.plan.row_plans import Memory, layout_of
from tests.plan.packing.rings import in_batches
from tests.simulated import Device
from tests.simulated.executors import executor_on
from tests.simulated.objects import Tensor

LAYERS, BLOCKS, TOKENS, DIM = 3, 6, 4, 32


def on(device, rng, blocks, slots, slot_nbytes):
    """Two caches and a ring on a device: the source, the destination, the program between them, and the slots."""
    source = rng.integers(0, 256, (LAYERS, blocks, TOKENS, DIM), dtype=np.uint8)
    cache = np.zeros((blocks, TOKENS, LAYERS, DIM), np.uint8)
    ring = np.zeros(slots * slot_nbytes + 256, np.uint8)
    for array in (source, cache, ring):
        device.own(array, 0)
    src = kvplan.KVLayout.from_tensors("layer block token dim", Tensor(source))
    dst = kvplan.KVLayout.from_tensors("block token layer dim", Tensor(cache))
    start = ring.ctypes.data + -ring.ctypes.data % 256
    layout = layout_of([Memory(ring.ctypes.data, ring.nbytes, "cuda:0", ring)])
    made = [Slot(layout, start + k * slot_nbytes, slot_nbytes) for k in range(slots)]
    return source, cache, kvplan.compile(src, dst), made


@pytest.mark.parametrize("order", ["src", "dst"])
@pytest.mark.parametrize("path", ["kernel", "copy_engine", "auto"])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("first", [0, 2])
def test_several_chunks_in_one_launch_whose_units_are_on_the_gpu(monkeypatch, path, order, seed, first):
    """As packed transfers submit them: by their places on the GPU; if they are many, the first ones with addresses."""
    if first:
        monkeypatch.setattr(pack_rows, "KEPT_SOON", 0)
    rng = np.random.default_rng(seed)
    device = Device(seed, eager=False)
    blocks, slot_nbytes = 400, 8192
    source, cache, program, slots = on(device, rng, blocks, 8, slot_nbytes)
    here, there = (rng.permutation(blocks)[:380].tolist() for _ in range(2))
    packing = packing_of(program.plan(here, there), order, most=slot_nbytes)
    with executor_on(device, path, limits=replace(DEFAULT_LIMITS, near_rows=2)) as executor:
        last, kept = in_batches(executor, packing, slots, rng)
        device.run()
        last.synchronize()
    expected = np.zeros_like(cache)
    expected[there] = source[:, here].transpose(1, 2, 0, 3)
    np.testing.assert_array_equal(cache, expected)
    assert not any(isinstance(plan, ChunkPlan) for plans in kept[:first] for plan in plans)
    later = [plan for plans in kept[first:] for plan in plans]
    assert later
    if path == "copy_engine":
        assert not any(isinstance(plan, ChunkPlan) for plan in later)
    else:
        assert all(isinstance(plan, ChunkPlan) and "parts" not in vars(plan) for plan in later)
        plan = later[-1]  # the parts that were not needed are those of the plan as it was before
        assert [part.units.shape for part in plan.parts] == [(2, plan.units)]
