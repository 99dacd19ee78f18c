"""On a real GPU: descriptors of device caches are true addresses. The driver copies them; kvplan only plans."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch

import kvplan
from kvplan import KVLayout

pytestmark = pytest.mark.gpu


@pytest.fixture
def memcpy():
    """``cuMemcpy`` of the driver: any address to any address."""
    driver = ctypes.CDLL("libcuda.so.1")

    def copy(descriptors) -> None:
        torch.cuda.synchronize()
        for src, dst, size in zip(*(column.tolist() for column in descriptors), strict=True):
            code = driver.cuMemcpy(ctypes.c_uint64(dst), ctypes.c_uint64(src), ctypes.c_size_t(size))
            assert code == 0

    return copy


def random_bytes(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, device="cuda")


@pytest.mark.parametrize("pool_notation", ["block layer kv token head dim", "kv (block token) layer head dim"])
def test_store_and_load_through_a_pinned_pool(pool_notation, memcpy):
    tensors = [random_bytes(2, 32, 16, 2, 128) for _ in range(4)]
    cache = KVLayout.from_tensors("layer: kv block token head dim", tensors)
    pool = kvplan.allocate(pool_notation, like=cache, num_blocks=8, block_tokens=64)
    assert cache.device == "cuda:0"
    assert all(region.pinned for region in pool.regions)
    before = [tensor.clone() for tensor in tensors]
    rng = np.random.default_rng(0)
    ids, blocks, others = rng.permutation(32)[:14], rng.permutation(8)[:4], rng.permutation(32)[:14]
    store = kvplan.compile(cache, pool).plan(ids, blocks, dst_skip=2)
    load = kvplan.compile(pool, cache).plan(blocks, others, src_skip=2)
    assert (store.direction, load.direction) == ("store", "load")
    memcpy(store.descriptors())
    for tensor in tensors:
        tensor.fill_(0xEE)
    memcpy(load.descriptors())
    for tensor, original in zip(tensors, before, strict=True):
        assert torch.equal(tensor[:, others], original[:, ids])
        rest = sorted(set(range(32)) - set(others.tolist()))
        assert bool((tensor[:, rest] == 0xEE).all())


def test_pinned_memory_is_recognised():
    buffer = torch.empty(1 << 20, dtype=torch.uint8, pin_memory=True)
    layout = KVLayout.from_tensors("block dim", buffer.view(16, -1))
    assert layout.regions[0].pinned
    assert not KVLayout.from_tensors("block dim", torch.empty(16, 8)).regions[0].pinned


def test_ids_on_the_device_are_refused():
    cache = KVLayout.from_tensors("block token dim", random_bytes(8, 4, 16))
    with pytest.raises(kvplan.BlockIndexError, match=r"pass ids\.cpu"):
        kvplan.compile(cache, cache).plan(torch.tensor([1], device="cuda"), [2])


def test_the_host_path_refuses_device_memory(executor):
    cache = KVLayout.from_tensors("block token dim", random_bytes(8, 4, 16))
    pool = kvplan.allocate("block token dim", like=cache)
    with pytest.raises(kvplan.PathError, match="this plan is a 'store'"):
        executor.submit(kvplan.compile(cache, pool).plan([1], [2]))
