"""What cannot be moved is refused before a byte moves; what fails on its way ends in an error; the executor goes on."""

from __future__ import annotations

from contextlib import contextmanager

import pytest

import kvplan
from kvplan import HostMemoryError, KVPlanError, PathError
from tests.contract.gpu.caches import GPU_PATHS, MOVE, Ids, both_ways, every_path, way
from tests.contract.gpu.machines import PATIENCE

CODE = 719
# Calls of the driver that a transfer may make. Each fails once, after some that do not.
CALLS = (
    "cuMemAlloc_v2", "cuMemHostAlloc", "cuEventCreate", "cuEventRecord", "cuEventQuery", "cuStreamCreateWithPriority",
    "cuStreamWaitEvent", "cuMemcpyAsync", "cuMemcpyBatchAsync", "cuMemcpy2DAsync_v2", "cuLaunchKernelEx",
    "cuModuleLoadData",
)  # fmt: skip


def goes_on(executor, *pairs):
    """Later transfers move what they should."""
    for pair in pairs:
        for ids in (Ids([0, 8, 4], [8, 0, 5]), MOVE):
            executor.submit(pair.plan(ids), priority="high" if ids is MOVE else "normal").synchronize(PATIENCE)
        pair.check()


@contextmanager
def refused(executor, pair, error, words):
    """An error of that class, no byte has moved, and the executor goes on."""
    with pytest.raises(error, match=words):
        yield
    pair.check()
    assert executor.stats().transfers == executor.stats().in_flight == 0
    if executor.policy.path != "host":
        goes_on(executor, way(pair.machine, "store", seed=50))


@pytest.mark.parametrize("path", ["kernel", "staged"])
@both_ways
@pytest.mark.parametrize("by_layer", [False, True])
def test_pageable_memory(gpu, route, by_layer, executor):
    pair = way(gpu, f"pageable {route}")
    with refused(executor, pair, HostMemoryError, "pinned"):
        executor.submit(pair.program.plan(*MOVE), by_layer=by_layer)


@pytest.mark.parametrize("route", ["load", "store"])
def test_pageable_memory_of_one_of_two_joined_plans(gpu, route, executor):
    """The first program is the same; what it is joined with decides."""
    first, pinned = way(gpu, route, seed=1), way(gpu, route, seed=3)
    pageable = way(gpu, f"pageable {route}", seed=5)
    for other, paths in ((pinned, GPU_PATHS), (pageable, ("copy_engine",)), (pinned, GPU_PATHS)):
        plan = kvplan.join([first.plan(MOVE), other.plan(MOVE)])
        assert executor.submit(plan).result().path in paths
        assert {one.path for one in executor.candidates(plan) if not one.refused} <= {*paths, "copy_engine_2d"}
        first.check()
        other.check()


@pytest.mark.parametrize(
    ("route", "path", "words"),
    [*[("host", path, "CPU") for path in GPU_PATHS], ("device", "staged", "stag"), ("push", "staged", "stag")],
)
def test_routes_that_a_path_does_not_serve(executor, pair, words):
    with refused(executor, pair, PathError, words):
        executor.submit(pair.program.plan(*MOVE))


@pytest.mark.parametrize("route", ["load", "store", "device"])
def test_memory_of_a_gpu_on_the_cpu_s_executor(gpu, route, pair):
    executor = gpu.executor(device="cpu")
    for ask in (executor.submit, executor.candidates):
        with pytest.raises(PathError, match=f"'{route}'" if ask == executor.submit else "path"):
            ask(pair.program.plan(*MOVE))
    pair.check()


@every_path
def test_memory_of_another_gpu(two_gpus, path):
    executor, pair = two_gpus.executor(path, "cuda:1"), way(two_gpus, "device")
    with pytest.raises(PathError, match="cuda:0"):
        executor.submit(pair.program.plan(*MOVE))
    pair.check()


@pytest.mark.parametrize(
    ("path", "device", "words"),
    [
        *[("auto", device, "device") for device in ("cuda:99", "cuda:-1", "cuda:x", "gpu", "")],
        ("host", "cuda:0", "path 'host' cannot serve device 'cuda:0'"),
        ("kernel", "cpu", "path 'kernel' cannot serve device 'cpu'"),
    ],
)
def test_devices_that_are_not_there_and_paths_of_others(gpu, path, device, words):
    with pytest.raises(PathError, match=words):
        gpu.executor(path, device)


@pytest.mark.parametrize("path", ["copy_engine", "copy_engine_2d", "staged"])
def test_a_stream_in_capture(gpu, executor, pair, stream):
    pair.warm(executor)
    with gpu.capture(stream), pytest.raises(KVPlanError, match="captur"):
        executor.submit(pair.program.plan(*MOVE), after=stream)
    goes_on(executor, pair)


@every_path
def test_an_after_that_fails(gpu, path):
    class Broken:
        def synchronize(self) -> None:
            raise RuntimeError("it never happened")

    executor, pair = gpu.executor(path), way(gpu, "load")
    transfer = executor.submit(pair.program.plan(*MOVE), after=Broken())
    with pytest.raises(kvplan.TransferError, match="it never happened"):
        transfer.synchronize(PATIENCE)
    assert transfer.done()
    assert executor.stats().failed == 1
    with pytest.raises(kvplan.TransferError, match="it never happened"):
        executor.submit(pair.program.plan([1], [1]), after=transfer)
    pair.check()
    goes_on(executor, pair)


@pytest.mark.parametrize("path", [path for path in GPU_PATHS if path != "auto"])
@both_ways
@pytest.mark.parametrize("call", CALLS)
def test_a_call_that_fails_is_the_error_of_its_transfer_and_of_no_other(simulated, path, route, call):
    driver = simulated.driver
    for spare in (0, 1, 2, 4, 7):
        executor, pair = simulated.executor(path), way(simulated, route, seed=spare)
        before = [root.copy() for root in pair.dst_bytes]
        plan, transfer = pair.plan(), None
        driver.fail(call, spare=spare, code=CODE)
        try:
            transfer = executor.submit(plan, by_layer=bool(spare % 2))
            transfer.synchronize(PATIENCE)
        except kvplan.TransferError as error:
            assert str(CODE) in str(error)
            rows = path == "copy_engine_2d" and call == "cuMemcpyAsync"  # of a 2-D copy that is made row by row
            assert ("cuMemcpy" if rows else call.removesuffix("_v2")) in str(error)
            assert transfer is None or transfer.done()
            assert executor.stats().failed == 1
        made = driver.failed(call)
        driver.finish()
        for memory, old, new in zip(pair.targets, before, pair.dst_bytes, strict=True):
            now = memory.bytes()
            assert ((now == old) | (now == new)).all(), "a byte is neither the old one nor the new one"
        executor.submit(plan).synchronize(PATIENCE)
        goes_on(executor, pair, way(simulated, route, seed=20))
        if not made:
            break


@every_path
def test_a_lost_context_ends_every_transfer_and_close_returns(simulated, executor, pair, stream):
    with simulated.hold(stream):
        transfer = executor.submit(pair.program.plan(*MOVE), after=stream)
        simulated.driver.lost = True
        for ask in (transfer.result, lambda: executor.submit(pair.program.plan([1], [2]))):
            with pytest.raises(kvplan.TransferError, match=r"\(700"):
                ask()
        executor.close()


def test_a_peer_that_cannot_be_reached(simulated):
    simulated.driver.unreachable |= {(0, 1), (1, 0)}
    for route in ("push", "pull"):
        pair = way(simulated, route)
        with pytest.raises(PathError, match="cuda:0 cannot reach the memory of cuda:1"):
            simulated.executor("kernel").submit(pair.program.plan(*MOVE))
        assert simulated.executor().submit(pair.plan()).result().path == "copy_engine"
        pair.check()
