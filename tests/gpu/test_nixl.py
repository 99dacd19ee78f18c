"""On a real GPU, where NIXL is installed: blocks of a GPU's cache go to an agent's host pool and come back."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import kvplan
from kvplan import KVLayout
from kvplan.nixl import NixlAgent

pytestmark = pytest.mark.gpu
PATIENCE = 60.0  # seconds


def test_a_gpu_s_blocks_are_written_and_read():
    pytest.importorskip("nixl", reason="NIXL is not installed: pip install nixl")
    cache = torch.arange(2 * 8 * 64, dtype=torch.int32, device="cuda:0").reshape(2, 8, 64)
    pool = np.zeros((8, 2, 64), np.int32)
    before = cache.cpu().numpy()
    torch.cuda.synchronize()
    with (
        NixlAgent("gpu", {"kv": KVLayout.from_tensors("layer block dim", cache)}) as mine,
        NixlAgent("pool", {"kv": KVLayout.from_tensors("block layer dim", pool)}) as other,
    ):
        peer = mine.meet(other.card())
        here, there = mine.layouts["kv"], peer.layouts["kv"]
        peer.submit(kvplan.compile(here, there).plan([1, 5], [0, 7])).synchronize(PATIENCE)
        peer.submit(kvplan.compile(there, here).plan([7], [3])).synchronize(PATIENCE)
        torch.cuda.synchronize()
    np.testing.assert_array_equal(pool[[0, 7]], before[:, [1, 5]].transpose(1, 0, 2))
    np.testing.assert_array_equal(cache[:, 3].cpu().numpy(), before[:, 5])
