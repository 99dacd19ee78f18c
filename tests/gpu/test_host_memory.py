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
from tests.contract.gpu.caches import DEVICE_NOTATION, PAGE_FIRST, Ids, Pair, both_ways, described, every_path
from tests.contract.gpu.machines import Real, SimulatedMemory
from tests.paged_caches import HOST_NOTATIONS, Paged
from tests.strategies import POISON

pytestmark = pytest.mark.gpu

PAGE = mmap.PAGESIZE
DEVICE, POOL = Paged(DEVICE_NOTATION, dim=4096, padded=True), Paged(PAGE_FIRST, dim=4096)


class Mapped(SimulatedMemory):
    """Pages of their own, as registering takes whole pages."""

    def __init__(self, content: np.ndarray, place: str) -> None:
        super().__init__(content, place)
        self.root = np.frombuffer(mmap.mmap(-1, content.nbytes), np.uint8)
        self.root[:] = content


class Mapping(Real):
    """A real GPU, and pageable memory that can be registered."""

    def place(self, content, place):
        return Mapped(content, place) if place == "pageable" else super().place(content, place)


@contextmanager
def registered(root: np.ndarray, *cuts: int) -> Iterator[None]:
    """The memory page-locked, as one registration, or as several that end at the cuts."""
    done = []
    try:
        for first, last in pairwise([0, *cuts, root.size]):
            code = torch.cuda.cudart().cudaHostRegister(root.ctypes.data + first, last - first, 0)
            assert int(code) == 0, code
            done.append(root.ctypes.data + first)
        yield
    finally:
        torch.cuda.synchronize()
        for address in done:
            assert int(torch.cuda.cudart().cudaHostUnregister(address)) == 0


def pair_on(machine: Mapping, route: str, pool: Paged = POOL, device: Paged = DEVICE) -> tuple[Pair, np.ndarray]:
    """A pair whose host side can be registered, and that side's memory."""
    forms = (pool, device) if route == "load" else (device, pool)
    pair = Pair(machine, *forms, f"pageable {route}")
    (host,) = pair.sources if route == "load" else pair.targets
    return pair, host.root


@pytest.mark.parametrize("path", ["kernel", "staged"])
@both_ways
def test_pageable_memory_is_refused_by_kernels_and_then_taken_once_registered(path, route):
    with Mapping() as machine:
        executor, (pair, root) = machine.executor(path), pair_on(machine, route)
        for _ in range(2):
            with pytest.raises(kvplan.HostMemoryError, match=r"pin|regist"):
                executor.submit(pair.program.plan([7, 0, 3], [2, 5, 1]))
            torch.cuda.synchronize()  # no kernel has faulted
            pair.check()
        pair, root = pair_on(machine, route)  # described while it is pageable
        with registered(root):
            executor.submit(pair.plan()).synchronize()
            pair.check()


@every_path
@both_ways
@pytest.mark.parametrize("told", [True, False], ids=["told", "found"])
@pytest.mark.parametrize("run", [584, 8200, 70_000])
def test_no_copy_crosses_from_one_registration_into_the_next(path, route, told, run):
    pool, device = Paged(PAGE_FIRST, dim=run, align=8), Paged(DEVICE_NOTATION, dim=run, align=8, padded=True)
    cut = next(cut for cut in range(pool.root_nbytes // 2 // PAGE * PAGE, 0, -PAGE) if (cut - pool.start) % run > 7)
    with Mapping() as machine:
        pair, root = pair_on(machine, route, pool, device)
        with registered(root, cut):
            seams = {"seams": (root.ctypes.data + cut,)} if told else {}
            sides = (described(pair.src, pair.sources, **(seams if route == "load" else {})),
                     described(pair.dst, pair.targets, **(seams if route == "store" else {})))  # fmt: skip
            pair.layouts, pair.program = sides, kvplan.compile(*sides)
            order = np.random.default_rng(2).permutation(9)
            executor = machine.executor(path)
            for ids in (Ids(order.tolist(), np.roll(order, 3).tolist()), Ids(range(9), range(9))):
                executor.submit(pair.plan(ids)).synchronize()
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
