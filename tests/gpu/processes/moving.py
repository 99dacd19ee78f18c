"""Blocks of another process's cache, pulled and pushed by a GPU of this one."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import kvplan
from kvplan import KVLayout
from tests.gpu.processes.owner import pattern
from tests.gpu.processes.visiting import EXPANDABLE, Visited

BLOCKS, LAYERS, ROW = 40, 4, 8192
NBYTES = 2 * LAYERS * BLOCKS * 16 * ROW  # 40 MiB: several pieces of an expandable segment
SHAPE = (LAYERS, 2, BLOCKS, 16, ROW)
NHD, PAGED = "layer kv block token dim", "block layer kv token dim"
memories = pytest.mark.parametrize("memory", [{}, EXPANDABLE], ids=["handle", "pieces"])
every_path = pytest.mark.parametrize("path", ["kernel", "copy_engine", "copy_engine_2d", "auto"])


def pull_and_push(visited: Visited, there: KVLayout, path: str) -> None:
    """Pull all blocks of the owner in another order, then push other bytes to it; compare every byte."""
    ids = np.random.default_rng(3).permutation(BLOCKS)
    mine = torch.zeros((BLOCKS, LAYERS, 2, 16, ROW), dtype=torch.uint8, device="cuda:0")
    layout = KVLayout.from_tensors(PAGED, mine)
    theirs = pattern(NBYTES, "cuda:0").view(SHAPE)
    torch.cuda.synchronize()
    with kvplan.Executor("cuda:0", kvplan.Policy(path=path)) as executor:
        executor.submit(kvplan.compile(there, layout).plan(ids, ids[::-1])).synchronize()
        expected = theirs.permute(2, 0, 1, 3, 4)[torch.from_numpy(ids).cuda()]
        assert torch.equal(mine[torch.from_numpy(ids[::-1].copy()).cuda()], expected)
        mine.copy_(pattern(NBYTES, "cuda:0", 11).view(SHAPE).permute(2, 0, 1, 3, 4))
        torch.cuda.synchronize()
        executor.submit(kvplan.compile(layout, there).plan(range(BLOCKS), range(BLOCKS))).synchronize()
    assert visited.ask("holds", 11)
