"""Several GPUs: an executor each, and each takes only what is its own."""

from __future__ import annotations

import threading

import pytest
import torch

import kvplan
from tests.paged_caches import DEVICE_NOTATION, HOST_NOTATIONS, Move, Paged, Pair

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices"),
]

every_path = pytest.mark.parametrize("path", ["copy_engine", "copy_engine_2d", "kernel", "staged", "auto"])
both_ways = pytest.mark.parametrize("direction", ["load", "store"])
DEVICE = Paged(DEVICE_NOTATION, block=32, dim=4096, padded=True)
POOL = Paged(HOST_NOTATIONS["page-first"], block=32, dim=4096)


def pair_on(device: str, direction: str, seed: int = 0) -> Pair:
    if direction == "load":
        return Pair(POOL, DEVICE, ("pinned", device), seed=seed)
    return Pair(DEVICE, POOL, (device, "pinned"), seed=seed)


@every_path
@both_ways
def test_two_devices_at_once_from_two_threads(path, direction):
    devices = ("cuda:0", "cuda:1")
    pairs = [pair_on(device, direction, seed) for seed, device in enumerate(devices)]
    plans = [[pair.plan(Move([k, k + 1], [30 - k, 31 - k])) for k in range(0, 30, 2)] for pair in pairs]
    failures = []

    def work(executor: kvplan.Executor, mine: list[kvplan.Plan]) -> None:
        try:
            for _ in range(10):
                flying = [executor.submit(plan) for plan in mine]
                for transfer in flying:
                    transfer.synchronize()
        except Exception as error:  # noqa: BLE001  # told below, in the test's own thread
            failures.append(error)

    executors = [kvplan.Executor(device=device, policy=kvplan.Policy(path=path)) for device in devices]
    threads = [threading.Thread(target=work, args=pair) for pair in zip(executors, plans, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for executor in executors:
        executor.close()
    assert not failures
    for pair in pairs:
        pair.check()


@every_path
@both_ways
def test_one_thread_serves_a_device_that_is_not_current(path, direction):
    pair = pair_on("cuda:1", direction)
    torch.cuda.set_device(0)
    with kvplan.Executor(device="cuda:1", policy=kvplan.Policy(path=path)) as executor:
        stream = torch.cuda.Stream("cuda:1")
        transfer = executor.submit(pair.plan(Move([3, 1], [5, 6])), after=stream)
        transfer.wait(stream)
        stream.synchronize()
        assert torch.cuda.current_device() == 0
        transfer.synchronize()
    pair.check()


@every_path
@both_ways
def test_a_plan_of_another_device_is_refused(path, direction):
    pair = pair_on("cuda:1", direction)
    with kvplan.Executor(device="cuda:0", policy=kvplan.Policy(path=path)) as executor:
        with pytest.raises(kvplan.PathError, match="cuda:1"):
            executor.submit(pair.program.plan([1], [2]))
        torch.cuda.synchronize("cuda:0")
        torch.cuda.synchronize("cuda:1")
        pair.check()
        own = pair_on("cuda:0", direction)
        executor.submit(own.plan(Move([1], [2]))).synchronize()
        own.check()
