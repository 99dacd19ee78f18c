"""Layers gigabytes apart: past a 2-D copy's largest pitch, and past what 32 bits count."""

from __future__ import annotations

import pytest
import torch

import kvplan
from kvplan import KVLayout
from tests.strategies import POISON

pytestmark = pytest.mark.gpu

LAYER_STRIDE = (9 << 28) + 4096  # bytes, 2.25 GiB and a little
SHAPE = (3, 9, 2, 584)  # layer, block, token, dim
STRIDES = (LAYER_STRIDE, 4096, 1024, 1)
POISON_WORD = int.from_bytes(bytes([POISON]) * 8, "little", signed=True)


@pytest.fixture(scope="module")
def memory():
    """4.5 GiB of poison on the GPU."""
    yield torch.full((2 * LAYER_STRIDE // 8 + 8192,), POISON_WORD, dtype=torch.int64, device="cuda:0")
    torch.cuda.empty_cache()


@pytest.mark.parametrize("path", ["copy_engine", "copy_engine_2d", "kernel", "staged", "auto"])
@pytest.mark.parametrize("direction", ["load", "store"])
def test_layers_gigabytes_apart(path, direction, memory, executor_of):
    cache = torch.as_strided(memory.view(torch.uint8), SHAPE, STRIDES, 4096)
    pool = torch.full((9, 3, 2, 584), POISON, dtype=torch.uint8, pin_memory=True)
    src, dst = (pool, cache) if direction == "load" else (cache, pool)
    src.copy_(torch.randint(0, 256, src.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(1)))
    expected_cache, expected_pool = cache.cpu(), pool.clone()
    blocks, pages = [8, 2, 3, 5, 0], [1, 0, 7, 8, 4]
    if direction == "load":
        expected_cache[:, blocks] = pool[pages].transpose(0, 1)
    else:
        expected_pool[pages] = expected_cache[:, blocks].transpose(0, 1)
    ids = (pages, blocks) if direction == "load" else (blocks, pages)
    notations = {id(pool): "block layer token dim", id(cache): "layer block token dim"}
    torch.cuda.synchronize()
    try:
        program = kvplan.compile(*(KVLayout.from_tensors(notations[id(side)], side) for side in (src, dst)))
        executor_of(path=path).submit(program.plan(*ids)).synchronize()
        assert torch.equal(cache.cpu(), expected_cache)
        assert torch.equal(pool, expected_pool)
    finally:
        cache.fill_(POISON)
    low, high = torch.aminmax(memory)  # and nothing was written anywhere else
    assert low.item() == high.item() == POISON_WORD
