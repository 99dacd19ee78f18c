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
from tests.contract.gpu.caches import DEVICE_NOTATION, PAGE_FIRST, Ids, Pair, both_ways, described, every_path
from tests.contract.gpu.machines import Real, SimulatedMemory
from tests.paged_caches import Paged

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
