"""Which host memory a GPU reaches, who says so, and where one registration ends and the next begins."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import numpy as np
import pytest
import torch

import kvplan
from kvplan import KVLayout
from tests.paged_caches import DEVICE_NOTATION, HOST_NOTATIONS, Move, Paged, Pair
from tests.strategies import POISON

pytestmark = pytest.mark.gpu

PAGE = mmap.PAGESIZE
every_path = pytest.mark.parametrize("path", ["copy_engine", "copy_engine_2d", "kernel", "staged", "auto"])
both_ways = pytest.mark.parametrize("direction", ["load", "store"])
DEVICE = Paged(DEVICE_NOTATION, dim=4096, padded=True)
POOL = Paged(HOST_NOTATIONS["page-first"], dim=4096)
MOVE = Move([7, 0, 3, 4, 8], [2, 5, 1, 0, 6])


def from_numpy(nbytes: int) -> np.ndarray:
    """Pages of its own, as registering takes whole pages."""
    memory = np.zeros(nbytes + 2 * PAGE, np.uint8)
    first = -memory.ctypes.data % PAGE
    return memory[first : first + nbytes]


def from_mmap(nbytes: int) -> np.ndarray:
    return np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)


SOURCES = {"numpy": from_numpy, "mmap": from_mmap}


@contextmanager
def registered(root: np.ndarray, *cuts: int) -> Iterator[None]:
    """The memory page-locked, as one registration, or as several that end at the cuts."""
    edges = [0, *cuts, root.size]
    done = []
    try:
        for first, last in pairwise(edges):
            code = torch.cuda.cudart().cudaHostRegister(root.ctypes.data + first, last - first, 0)
            assert int(code) == 0, code
            done.append(root.ctypes.data + first)
        yield
    finally:
        torch.cuda.synchronize()
        for address in done:
            assert int(torch.cuda.cudart().cudaHostUnregister(address)) == 0


def pair_on(direction: str, pool: Paged, root: np.ndarray, device: Paged = DEVICE, **told) -> Pair:
    """Like ``pair_of``, with the host side in memory that is there already."""
    if direction == "load":
        return Pair(pool, device, ("host", "cuda:0"), src_roots=[root], told=(told, {}))
    return Pair(device, pool, ("cuda:0", "host"), dst_roots=[root], told=({}, told))


@pytest.mark.parametrize("path", ["copy_engine", "copy_engine_2d", "auto"])
@both_ways
@pytest.mark.parametrize("source", SOURCES)
def test_pageable_memory_goes_the_copy_engine_s_way(path, direction, source, executor_of):
    pair = pair_on(direction, POOL, SOURCES[source](POOL.root_nbytes))
    executor_of(path=path).submit(pair.plan(MOVE)).synchronize()
    pair.check()


@pytest.mark.parametrize("path", ["copy_engine", "copy_engine_2d", "auto"])
@both_ways
def test_pageable_memory_of_torch_goes_the_copy_engine_s_way(path, direction, executor_of):
    sides = ((POOL, "cpu"), (DEVICE, "cuda:0"))
    (src, here), (dst, there) = sides if direction == "load" else sides[::-1]
    pair = Pair(src, dst, (here, there))
    executor_of(path=path).submit(pair.plan(MOVE)).synchronize()
    pair.check()


@pytest.mark.parametrize("path", ["kernel", "staged"])
@both_ways
@pytest.mark.parametrize("source", SOURCES)
def test_pageable_memory_is_refused_by_kernels_and_then_taken_once_registered(path, direction, source, executor_of):
    executor, root = executor_of(path=path), SOURCES[source](POOL.root_nbytes)
    pair = pair_on(direction, POOL, root)
    for _ in range(2):
        with pytest.raises(kvplan.HostMemoryError, match=r"pin|regist"):
            executor.submit(pair.program.plan(MOVE.src, MOVE.dst))
        torch.cuda.synchronize()  # no kernel has faulted
        pair.check()
    root = SOURCES[source](POOL.root_nbytes)
    pair = pair_on(direction, POOL, root)  # described while it is pageable
    with registered(root):
        executor.submit(pair.plan(MOVE)).synchronize()
        pair.check()


@pytest.mark.parametrize("path", ["kernel", "staged"])
@both_ways
def test_one_pageable_tensor_among_pinned_ones_is_refused(path, direction, executor_of):
    pool = Paged(DEVICE_NOTATION, dim=4096)
    sides = ((pool, "pinned"), (DEVICE, "cuda:0"))
    (src, here), (dst, there) = sides if direction == "load" else sides[::-1]
    pair = Pair(src, dst, (here, there))
    roots = pair.src_roots if direction == "load" else pair.dst_roots
    roots[1] = roots[1].clone()  # pageable
    assert not roots[1].is_pinned()
    layouts = src.describe(pair.src_roots), dst.describe(pair.dst_roots)
    with pytest.raises(kvplan.HostMemoryError):
        executor_of(path=path).submit(kvplan.compile(*layouts).plan(MOVE.src, MOVE.dst))
    torch.cuda.synchronize()
    pair.check()


@every_path
@both_ways
@pytest.mark.parametrize("source", SOURCES)
def test_memory_registered_by_its_owner_is_pinned(path, direction, source, executor_of):
    root = SOURCES[source](POOL.root_nbytes)
    with registered(root):
        pair = pair_on(direction, POOL, root)
        executor_of(path=path).submit(pair.plan(MOVE)).synchronize()
        pair.check()


@every_path
@both_ways
@pytest.mark.parametrize("told", [True, False], ids=["told", "found"])
@pytest.mark.parametrize("run", [584, 8200, 70_000])
def test_no_copy_crosses_from_one_registration_into_the_next(path, direction, told, run, executor_of):
    pool = Paged(HOST_NOTATIONS["page-first"], dim=run, align=8)
    device = Paged(DEVICE_NOTATION, dim=run, align=8, padded=True)
    cut = next(cut for cut in range(pool.root_nbytes // 2 // PAGE * PAGE, 0, -PAGE) if (cut - pool.start) % run > 7)
    assert pool.start < cut < pool.start + pool.strides[0] * pool.block
    root = from_mmap(pool.root_nbytes)
    with registered(root, cut):
        seams = {"seams": (root.ctypes.data + cut,)} if told else {}
        pair = pair_on(direction, pool, root, device, **seams)
        order = np.random.default_rng(2).permutation(9)
        executor_of(path=path).submit(pair.plan(Move(order, np.roll(order, 3)))).synchronize()
        pair.check()
        executor_of(path=path).submit(pair.plan(Move(range(9), range(9)))).synchronize()
        pair.check()


@every_path
@pytest.mark.parametrize(
    "notation", [*HOST_NOTATIONS.values(), "layer: block kv token head dim", "block: layer kv (token head dim)"]
)
def test_allocated_pools_are_pinned_and_serve_every_path(path, notation, executor_of):
    executor = executor_of(path=path)
    tensors = [torch.randint(0, 256, (2, 9, 16, 2, 128), dtype=torch.uint8, device="cuda:0") for _ in range(3)]
    before = [tensor.clone() for tensor in tensors]
    cache = KVLayout.from_tensors("layer: kv block token head dim", tensors)
    pool = kvplan.allocate(notation, like=cache, num_blocks=4, block_tokens=64, sizes=SPLIT.get(notation))
    flat = pool.tensors if isinstance(pool.tensors, list) else [pool.tensors]
    assert all(tensor.is_pinned() for tensor in flat)
    assert all(region.pinned for region in pool.regions)
    for tensor in flat:
        tensor.fill_(POISON)
    torch.cuda.synchronize()
    order = torch.randperm(9, generator=torch.Generator().manual_seed(1)).tolist()
    executor.submit(kvplan.compile(cache, pool).plan(order, [2, 0, 3])).synchronize()
    for tensor in tensors:
        tensor.fill_(POISON)
    torch.cuda.synchronize()
    executor.submit(kvplan.compile(pool, cache).plan([2, 0, 3], order[::-1])).synchronize()
    for tensor, was in zip(tensors, before, strict=True):
        assert torch.equal(tensor[:, order[::-1]], was[:, order])


SPLIT = {"block: layer kv (token head dim)": {"token": 64, "head": 2}}


@every_path
def test_a_pool_of_pages_holds_what_was_stored(path, executor_of):
    tensors = [torch.randint(0, 256, (2, 9, 16, 2, 128), dtype=torch.uint8, device="cuda:0") for _ in range(3)]
    cache = KVLayout.from_tensors("layer: kv block token head dim", tensors)
    pool = kvplan.allocate("block layer kv token head dim", like=cache, num_blocks=4, block_tokens=64)
    pool.tensors.fill_(POISON)
    torch.cuda.synchronize()
    executor_of(path=path).submit(kvplan.compile(cache, pool).plan([4, 8, 0, 2, 7], [3, 1], dst_skip=2)).synchronize()
    pages = pool.tensors.view(4, 3, 2, 4, 16, 2, 128)
    expected = torch.full_like(pages, POISON)
    for unit, block in enumerate([4, 8, 0, 2, 7], start=2):
        page = [3, 1][unit // 4]
        for layer, tensor in enumerate(tensors):
            expected[page, layer, :, unit % 4] = tensor[:, block].cpu()
    assert torch.equal(pages, expected)
