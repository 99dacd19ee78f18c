"""Two GPUs: an executor each, at once, from two threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import kvplan
from tests.contract.gpu.caches import DEVICE_NOTATION, PAGE_FIRST, Ids, Pair, every_path
from tests.contract.gpu.machines import PATIENCE, Real
from tests.paged_caches import Paged

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices"),
]
DEVICE, POOL = Paged(DEVICE_NOTATION, block=32, dim=4096, padded=True), Paged(PAGE_FIRST, block=32, dim=4096)


class Second(Real):
    """Its first GPU is the second one."""

    def place(self, content, place):
        return super().place(content, "cuda:1" if place == "cuda:0" else place)


@every_path
@pytest.mark.parametrize("route", ["load", "store"])
def test_two_devices_at_once_from_two_threads(path, route):
    forms = (POOL, DEVICE) if route == "load" else (DEVICE, POOL)
    with Real() as first, Second() as second, ThreadPoolExecutor(2) as threads:
        pairs = [Pair(machine, *forms, route, seed=seed) for seed, machine in enumerate((first, second))]
        plans = [[pair.plan(Ids([k, k + 1], [30 - k, 31 - k])) for k in range(0, 30, 2)] for pair in pairs]

        def work(executor: kvplan.Executor, mine: list[kvplan.Plan]) -> None:
            for _ in range(10):
                for transfer in [executor.submit(plan) for plan in mine]:
                    transfer.synchronize(PATIENCE)

        executors = [first.executor(path, "cuda:0"), second.executor(path, "cuda:1")]
        list(threads.map(work, executors, plans))
        for pair in pairs:
            pair.check()
