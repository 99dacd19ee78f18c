"""Chunks of packed transfers on a real GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import kvplan
from kvplan.plan.row_plans import Memory, layout_of
from tests.plan.chunks.rings import Half

pytestmark = pytest.mark.gpu
LAYERS, SLOT_NBYTES, SLOTS = 8, 1 << 20, 6


@pytest.mark.parametrize(("blocks", "row"), [(40_000, 256), (20_000, 576), (4_000, 8192)])
def test_chunks_of_a_large_cache(executor_of, blocks, row):
    rng = np.random.default_rng(row)
    source = torch.randint(0, 256, (LAYERS, blocks, row), dtype=torch.uint8, device="cuda:0")
    cache = torch.zeros((blocks, LAYERS, row), dtype=torch.uint8, device="cuda:0")
    ring = torch.zeros(SLOTS * SLOT_NBYTES + 256, dtype=torch.uint8, device="cuda:0")
    layout = layout_of([Memory(ring.data_ptr(), ring.nbytes, "cuda:0", ring)])
    start = ring.data_ptr() + -ring.data_ptr() % 256
    torch.cuda.synchronize()
    program = kvplan.compile(
        kvplan.KVLayout.from_tensors("layer block dim", source), kvplan.KVLayout.from_tensors("block layer dim", cache)
    )
    executor = executor_of(path="auto")
    for turn in range(3):  # each with addresses of its own, and the same slots
        here, there = (rng.permutation(blocks)[: blocks - turn] for _ in range(2))
        plan = program.plan(here, there)
        gathers, scatters = Half(plan, 0, SLOT_NBYTES), Half(plan, 1, SLOT_NBYTES)
        cache.zero_()
        torch.cuda.synchronize()
        last = None
        for k in range(len(gathers.cut.chunks)):
            slot = start + k % SLOTS * SLOT_NBYTES
            gathered = executor.submit(gathers.plan(k, gathers.ids(k, 0), layout, slot), after=last)
            last = executor.submit(scatters.plan(k, gathers.ids(k, 1), layout, slot), after=gathered)
        last.synchronize(60.0)
        assert torch.equal(cache[torch.from_numpy(there)], source[:, torch.from_numpy(here)].transpose(0, 1))
