"""Chunks of packed transfers on a real GPU: several in one launch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import kvplan
from kvplan.plan.packing.chunk_half import Slot
from kvplan.plan.packing.packing import packing_of
from kvplan.plan.row_plans import Memory, layout_of
from tests.plan.packing.rings import in_batches

pytestmark = pytest.mark.gpu
LAYERS, SLOT_NBYTES, SLOTS = 8, 1 << 20, 6


@pytest.mark.parametrize("order", ["src", "dst"])
@pytest.mark.parametrize(("blocks", "row"), [(40_000, 256), (20_000, 576), (4_000, 8192)])
def test_several_chunks_in_one_launch(executor_of, blocks, row, order):
    rng = np.random.default_rng(row)
    source = torch.randint(0, 256, (LAYERS, blocks, row), dtype=torch.uint8, device="cuda:0")
    cache = torch.zeros((blocks, LAYERS, row), dtype=torch.uint8, device="cuda:0")
    ring = torch.zeros(SLOTS * SLOT_NBYTES + 256, dtype=torch.uint8, device="cuda:0")
    layout = layout_of([Memory(ring.data_ptr(), ring.nbytes, "cuda:0", ring)])
    start = ring.data_ptr() + -ring.data_ptr() % 256
    slots = [Slot(layout, start + k * SLOT_NBYTES, SLOT_NBYTES) for k in range(SLOTS)]
    torch.cuda.synchronize()
    program = kvplan.compile(
        kvplan.KVLayout.from_tensors("layer block dim", source), kvplan.KVLayout.from_tensors("block layer dim", cache)
    )
    executor = executor_of(path="auto")
    for turn in range(3):  # each with addresses of its own, and the same slots
        here, there = (rng.permutation(blocks)[: blocks - turn] for _ in range(2))
        packing = packing_of(program.plan(here, there), order, most=SLOT_NBYTES)
        cache.zero_()
        torch.cuda.synchronize()
        in_batches(executor, packing, slots, rng).synchronize(60.0)
        assert torch.equal(cache[torch.from_numpy(there)], source[:, torch.from_numpy(here)].transpose(0, 1))
