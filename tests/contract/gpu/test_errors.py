"""What cannot be moved is refused before a byte moves; what fails on its way ends in an error; the executor goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import kvplan
from kvplan import BlockIndexError, HostMemoryError, KVLayout, KVPlanError, LayoutError, OverlapError, PathError
from tests.contract.gpu.caches import CACHE, GPU_PATHS, MOVE, POOL, Ids, Pair, both_ways, every_path, way
from tests.contract.gpu.machines import PATIENCE, Machine, Simulated

CODE = 719
# Calls of the driver that a transfer may make. Each fails once, after some that do not.
CALLS = (
    "cuMemAlloc_v2", "cuMemHostAlloc", "cuEventCreate", "cuEventRecord", "cuEventQuery", "cuStreamCreateWithPriority",
    "cuStreamWaitEvent", "cuMemcpyAsync", "cuMemcpyBatchAsync", "cuMemcpy2DAsync_v2", "cuLaunchKernelEx",
    "cuModuleLoadData",
)  # fmt: skip


def goes_on(executor: kvplan.Executor, *pairs: Pair) -> None:
    """Later transfers move what they should."""
    for pair in pairs:
        for ids in (Ids([0, 8, 4], [8, 0, 5]), MOVE):
            executor.submit(pair.plan(ids), priority="high" if ids is MOVE else "normal").synchronize(PATIENCE)
        pair.check()


@contextmanager
def refused(executor: kvplan.Executor, pair: Pair, error: type[Exception], words: str) -> Iterator[None]:
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
def test_pageable_memory(gpu: Machine, path: str, route: str, by_layer: bool) -> None:
    executor, pair = gpu.executor(path), way(gpu, f"pageable {route}")
    with refused(executor, pair, HostMemoryError, "pinned"):
        executor.submit(pair.program.plan(*MOVE), by_layer=by_layer)


@pytest.mark.parametrize("route", ["load", "store"])
def test_pageable_memory_of_one_of_two_joined_plans(gpu: Machine, route: str) -> None:
    """The first program is the same; what it is joined with decides."""
    executor, first, pinned = gpu.executor("auto"), way(gpu, route, seed=1), way(gpu, route, seed=3)
    pageable = way(gpu, f"pageable {route}", seed=5)
    for other, paths in ((pinned, GPU_PATHS), (pageable, ("copy_engine",)), (pinned, GPU_PATHS)):
        plan = kvplan.join([first.plan(MOVE), other.plan(MOVE)])
        assert executor.submit(plan).result().path in paths
        assert {one.path for one in executor.candidates(plan) if not one.refused} <= {*paths, "copy_engine_2d"}
        first.check()
        other.check()


# By name: a route, the paths that refuse it, and the words.
UNSERVED = {
    "within the CPU": ("host", GPU_PATHS, "CPU"),
    "staging within a GPU": ("device", ["staged"], "stag"),
    "staging between GPUs": ("push", ["staged"], "stag"),
}


@pytest.mark.parametrize(
    ("route", "path", "words"),
    [(route, path, words) for route, paths, words in UNSERVED.values() for path in paths],
)  # fmt: skip
def test_routes_that_a_path_does_not_serve(gpu: Machine, route: str, path: str, words: str) -> None:
    if route == "push" and gpu.count < 2:
        pytest.skip("there is one GPU")
    executor, pair = gpu.executor(path), way(gpu, route)
    with refused(executor, pair, PathError, words):
        executor.submit(pair.program.plan(*MOVE))


@pytest.mark.parametrize("route", ["load", "store", "device"])
def test_memory_of_a_gpu_on_the_cpu_s_executor(gpu: Machine, route: str) -> None:
    executor, pair = gpu.executor(device="cpu"), way(gpu, route)
    for ask in (executor.submit, executor.candidates):
        with pytest.raises(PathError, match=f"'{route}'" if ask == executor.submit else "path"):
            ask(pair.program.plan(*MOVE))
    pair.check()


@every_path
def test_memory_of_another_gpu(two_gpus: Machine, path: str) -> None:
    executor, pair = two_gpus.executor(path, "cuda:1"), way(two_gpus, "device")
    with pytest.raises(PathError, match="cuda:0"):
        executor.submit(pair.program.plan(*MOVE))
    pair.check()


@every_path
@both_ways
def test_layouts_that_cannot_be_moved(gpu: Machine, path: str, route: str) -> None:
    executor, pair = gpu.executor(path), way(gpu, route)
    sizes = {"layer": 2, "block": 9, "token": 2, "head": 1, "dim": 256}
    virtual = KVLayout.from_spec(
        {"notation": CACHE.notation, "sizes": sizes, "dtype": "uint8", "device": "cuda:0"}
    )  # fmt: skip
    host = pair.layouts[0 if route == "load" else 1]
    for layouts in ((virtual, host), (host, virtual)):
        with refused(executor, pair, LayoutError, "virtual"):
            executor.submit(kvplan.compile(*layouts).plan(*MOVE))
        executor = gpu.executor(path)


def test_a_destination_that_is_read_only(gpu: Machine) -> None:
    executor, pair = gpu.executor(), way(gpu, "store")
    view = np.zeros(POOL.shape, np.uint8)
    view.setflags(write=False)
    fixed = KVLayout.from_tensors(POOL.notation, view)
    with refused(executor, pair, LayoutError, "read-only"):
        executor.submit(kvplan.compile(pair.layouts[0], fixed).plan(*MOVE))


@every_path
def test_ids_that_are_no_blocks(gpu: Machine, path: str) -> None:
    executor, pair = gpu.executor(path), way(gpu, "load")
    plan = pair.program.plan
    for make, error in (
        (lambda: plan([9], [1]), BlockIndexError), (lambda: plan([1], [-1]), BlockIndexError),
        (lambda: plan([1, 2], [3]), BlockIndexError), (lambda: plan([1, 2], [3, 3]), OverlapError),
        (lambda: kvplan.join([plan([1, 2], [3, 4]), plan([5], [4])]), OverlapError),
    ):  # fmt: skip
        with pytest.raises(error):
            executor.submit(make())
    pair.check()
    goes_on(executor, pair)


Arguments = tuple[tuple[Any, ...], dict[str, Any]]
WRONG: dict[str, tuple[Callable[[kvplan.Plan], Arguments], str]] = {
    "plan": (lambda plan: ((3,), {}), "plan is a int"),
    "after": (lambda plan: ((plan, 3), {}), "after is a builtins.int"),
    "priority": (lambda plan: ((plan,), {"priority": "low"}), "priority is 'low'"),
}


@pytest.mark.parametrize("name", WRONG)
def test_arguments_of_submit(gpu: Machine, name: str) -> None:
    executor, pair = gpu.executor(), way(gpu, "load")
    make, words = WRONG[name]
    arguments, more = make(pair.program.plan(*MOVE))
    with refused(executor, pair, KVPlanError, words):
        executor.submit(*arguments, **more)


@pytest.mark.parametrize("device", ["cuda:99", "cuda:-1", "cuda:x", "gpu", ""])
def test_devices_that_are_not_there(gpu: Machine, device: str) -> None:
    with pytest.raises(PathError, match="device"):
        gpu.executor(device=device)


@pytest.mark.parametrize(("path", "device"), [("host", "cuda:0"), ("kernel", "cpu")])
def test_a_path_of_another_device(gpu: Machine, path: str, device: str) -> None:
    with pytest.raises(PathError, match=f"path '{path}' cannot serve device '{device}'"):
        gpu.executor(path, device)


@pytest.mark.parametrize("path", ["copy_engine", "copy_engine_2d", "staged"])
def test_a_stream_in_capture(gpu: Machine, path: str) -> None:
    executor, pair, stream = gpu.executor(path), way(gpu, "load"), gpu.stream()
    pair.warm(executor)
    with gpu.capture(stream), pytest.raises(KVPlanError, match="captur"):
        executor.submit(pair.program.plan(*MOVE), after=stream)
    goes_on(executor, pair)


@every_path
def test_an_after_that_fails(gpu: Machine, path: str) -> None:
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
def test_a_call_that_fails_is_the_error_of_its_transfer_and_of_no_other(
    simulated: Simulated, path: str, route: str, call: str
) -> None:  # fmt: skip
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
def test_a_lost_context_ends_every_transfer_and_close_returns(simulated: Simulated, path: str) -> None:
    executor, pair, stream = simulated.executor(path), way(simulated, "load"), simulated.stream()
    with simulated.hold(stream):
        transfer = executor.submit(pair.program.plan(*MOVE), after=stream)
        simulated.driver.lost = True
        for ask in (transfer.result, lambda: executor.submit(pair.program.plan([1], [2]))):
            with pytest.raises(kvplan.TransferError, match=r"\(700"):
                ask()
        executor.close()


def test_a_peer_that_cannot_be_reached(simulated: Simulated) -> None:
    simulated.driver.unreachable |= {(0, 1), (1, 0)}
    for route in ("push", "pull"):
        pair = way(simulated, route)
        with pytest.raises(PathError, match="cuda:0 cannot reach the memory of cuda:1"):
            simulated.executor("kernel").submit(pair.program.plan(*MOVE))
        assert simulated.executor().submit(pair.plan()).result().path == "copy_engine"
        pair.check()
