"""Promises of an executor beside those of order, layers and errors: the caller's streams, memory, choices, forks."""

from __future__ import annotations

import multiprocessing
import os
import threading

import numpy as np
import pytest

import kvplan
from kvplan.errors import PathError
from tests.contract.gpu.caches import DEVICE_NOTATION, MOVE, PAGE_FIRST, Ids, Paged, both_ways, every_path, way
from tests.contract.gpu.favouring import drawn, favouring
from tests.contract.gpu.machines import PATIENCE, Machine, Simulated

PATHS = ("kernel", "staged", "copy_engine", "copy_engine_2d")


def opened(gpu: Machine, **more: object) -> kvplan.Executor:
    made = kvplan.Executor("cuda:0", **more)
    gpu.executors.append(made)
    return made


@both_ways
@pytest.mark.parametrize("path", ["kernel", "staged"])
@pytest.mark.parametrize("by_layer", [False, True])
def test_kernels_run_on_the_stream_that_the_caller_lends(gpu: Machine, path: str, route: str, by_layer: bool) -> None:
    lent, pair, asked = gpu.stream(), way(gpu, route), list[None]()
    executor = opened(gpu, policy=kvplan.Policy(path=path), kernel_stream=lambda: (asked.append(None), lent)[1])
    assert not asked, "it is asked for by the first kernel"
    pair.warm(executor)
    with gpu.hold(lent) as gate:
        transfer = executor.submit(pair.plan(), by_layer=by_layer)
        with pytest.raises(kvplan.TransferError, match="not finished"):
            transfer.synchronize(timeout=0.02)
        gate.open()
        transfer.synchronize(PATIENCE)
    pair.check()
    executor.close()
    gpu.finish(lent)  # it is the caller's, and stays


def test_a_function_that_returns_no_stream(gpu: Machine) -> None:
    returned: list[object] = [7]
    pair, executor = way(gpu, "load"), opened(
        gpu, policy=kvplan.Policy(path="kernel"), kernel_stream=lambda: returned[0]
    )  # fmt: skip
    with pytest.raises(PathError, match="the function kernel_stream returned 7"):
        executor.submit(pair.program.plan(*MOVE))
    returned[0] = None
    executor.submit(pair.plan()).synchronize(PATIENCE)
    pair.check()


@every_path
def test_many_submits_take_no_more_memory_than_the_first(simulated: Simulated, path: str) -> None:
    """Also of a caller that asks for no result."""
    executor, pair = simulated.executor(path), way(simulated, "load")
    plan = pair.plan()

    def held() -> dict[str, int]:
        for k in range(100):
            transfer = executor.submit(plan)
            if k % 20 == 19:
                transfer.synchronize(PATIENCE)
        return simulated.driver.left()

    first = held()
    for _ in range(5):
        last = held()
    assert last.get("bytes", 0) <= first.get("bytes", 0)
    assert last["events"] <= 2 * first["events"]
    pair.check()


@both_ways
@pytest.mark.parametrize("most", [11 << 19, 5_500_000, 9 << 18])
def test_a_ring_takes_no_byte_more_than_the_policy_allows(simulated: Simulated, route: str, most: int) -> None:
    executors = [simulated.executor("kernel"), simulated.executor("staged", staging_bytes=most)]
    held = [0]
    for executor in executors:
        pair = way(simulated, route)
        executor.submit(pair.plan()).synchronize(PATIENCE)
        pair.check()
        held.append(simulated.driver.left()["bytes"])
    slack = 1 << 20  # a block of slots or tables
    assert held[2] - held[1] <= most + held[1] + slack


def test_a_block_larger_than_the_ring_is_refused_and_named(gpu: Machine) -> None:
    pair = way(gpu, "load", Paged(DEVICE_NOTATION, dim=96, padded=True), Paged(PAGE_FIRST, token=6, dim=96))
    with pytest.raises(PathError, match=r"staging_bytes is 1024; a block here takes \d+ bytes of the ring"):
        gpu.executor("staged", staging_bytes=1024).submit(pair.program.plan([1], [2, 4, 5]))
    candidates = opened(
        gpu, policy=kvplan.Policy(staging_bytes=1024), profile=favouring("staged")
    ).candidates(pair.program.plan([1], [2, 4, 5]))  # fmt: skip
    assert [bool(each.refused) for each in candidates] == [False, False, False, True]
    assert "staging_bytes is 1024" in candidates[-1].refused


@both_ways
def test_the_path_depends_on_the_number_of_blocks(gpu: Machine, route: str) -> None:
    pair, taken = way(gpu, route), set()
    for seed in range(12):
        executor, paths = opened(gpu, profile=drawn(seed)), []
        for count in range(1, 9):
            plan = pair.plan(Ids(range(count), range(count)))
            first, result = executor.candidates(plan)[0], executor.submit(plan).result()
            assert (result.path, result.predicted) == (first.path, pytest.approx(first.seconds))
            paths.append(result.path)
        taken.add(len(set(paths)))
    assert max(taken) > 1, "some profile changes the path"
    pair.check()


@both_ways
@pytest.mark.parametrize("path", PATHS)
def test_auto_takes_the_path_that_the_profile_makes_the_cheapest(gpu: Machine, path: str, route: str) -> None:
    pair, executor = way(gpu, route), opened(gpu, profile=favouring(path))
    for ids in (MOVE, MOVE, Ids([3], [1])):
        plan = pair.plan(ids)
        first, result = executor.candidates(plan)[0], executor.submit(plan).result()
        assert (result.path, result.predicted) == (first.path, first.seconds) == (path, first.seconds)
    pair.check()


@both_ways
@pytest.mark.parametrize("by_layer", [False, True])
def test_every_choice_is_the_choice_of_the_model(gpu: Machine, route: str, by_layer: bool) -> None:
    notation, rng = "layer block kv token head dim", np.random.default_rng(1)
    pair = way(gpu, route, Paged(notation, block=64, dim=256), Paged(notation, block=64, dim=256))
    executor = opened(gpu)
    for _ in range(24):
        count, first = int(rng.integers(1, 48)), int(rng.integers(0, 16))
        rising = np.arange(first, first + count)
        ids = [rising if rng.random() < 0.5 else rng.permutation(64)[:count] for _ in range(2)]
        plan = pair.plan(Ids(*(each.tolist() for each in ids)))
        best = executor.candidates(plan, by_layer=by_layer)[0]
        assert executor.submit(plan, by_layer=by_layer).result().path == best.path
    pair.check()


def test_pageable_memory_is_looked_at_again_once_it_is_pinned(simulated: Simulated) -> None:
    pair, executor = way(simulated, "pageable load"), opened(simulated, profile=favouring("kernel"))
    assert executor.submit(pair.plan()).result().path == "copy_engine"
    for memory in pair.sources:
        simulated.driver.pin(memory.root)
    assert executor.submit(pair.plan()).result().path == "kernel"
    pair.check()


@every_path
@both_ways
@pytest.mark.parametrize("late", [False, True])
def test_an_event_counts_as_it_was_recorded_at_the_submit(
    simulated: Simulated, path: str, route: str, late: bool
) -> None:  # fmt: skip
    """However late the transfer is issued, and whatever its owner records on the event since."""
    executor, pair, happened = simulated.executor(path), way(simulated, route), threading.Event()
    producer, other = simulated.stream(), simulated.stream()
    pair.warm(executor)
    if late:
        executor.submit(way(simulated, route, seed=9).plan(), after=happened)
    with simulated.hold(other):
        pair.renew(producer, pair.fresh(1))
        event = simulated.event(producer)
        transfer = executor.submit(pair.plan(), after=event)
        simulated.driver.cuEventRecord(event.cuda_event, other.cuda_stream)
        happened.set()
        transfer.synchronize(PATIENCE)
    pair.check()


@every_path
def test_an_after_may_close_the_executor(gpu: Machine, path: str) -> None:
    executor, pair = gpu.executor(path), way(gpu, "load")

    class Closes:
        def synchronize(self) -> None:
            executor.close()

    executor.submit(pair.plan(), after=Closes()).synchronize(PATIENCE)
    with pytest.raises(kvplan.TransferError, match="closed"):
        executor.submit(pair.program.plan([1], [2]))
    pair.check()


@pytest.mark.parametrize("priority", ["normal", "high"])
def test_a_transfer_after_one_that_fails_later_fails_too(simulated: Simulated, priority: str) -> None:
    cache, pool = Paged(DEVICE_NOTATION, block=60, dim=16, padded=True), Paged(PAGE_FIRST, block=60, dim=16)
    executor, load, store = (
        simulated.executor("copy_engine"),
        *(way(simulated, r, cache, pool) for r in ("load", "store")),
    )
    ids = Ids(range(50), range(50))
    for pair in (load, store):
        pair.warm(executor)
    simulated.driver.fail("cuMemcpyAsync", spare=20)
    first = executor.submit(load.program.plan(*ids))  # so many calls that a thread makes them
    try:
        second = executor.submit(store.program.plan(*ids), after=first, priority=priority)
        with pytest.raises(kvplan.TransferError, match=r"failed|descriptor 20"):
            second.synchronize(PATIENCE)
    except kvplan.TransferError as error:
        assert "descriptor 20" in str(error)  # the submit had seen it already
    with pytest.raises(kvplan.TransferError, match="descriptor"):
        first.synchronize(PATIENCE)
    executor.submit(store.plan()).synchronize(PATIENCE)
    store.check()


@pytest.mark.parametrize("path", ["copy_engine", "copy_engine_2d"])
@pytest.mark.parametrize("first", ["load", "store"])
@pytest.mark.parametrize("priority", ["normal", "high"])
def test_a_transfer_whose_calls_are_still_being_made_is_waited_for(
    simulated: Simulated, path: str, first: str, priority: str
) -> None:  # fmt: skip
    """A stream that waits for an event before its record would wait for nothing."""
    forms = Paged(DEVICE_NOTATION, block=60, dim=16, padded=True), Paged(PAGE_FIRST, block=60, dim=16)
    executor, one = simulated.executor(path), way(simulated, first, *forms)
    other = way(simulated, "store" if first == "load" else "load", *forms, seed=5).behind(one)
    for pair in (one, other):
        pair.warm(executor)
    simulated.driver.slow |= {"cuMemcpyAsync", "cuMemcpyBatchAsync", "cuMemcpy2DAsync_v2"}
    ids = [Ids(*(np.random.default_rng(seed + k).permutation(60)[:50].tolist() for k in (0, 9))) for seed in (1, 2)]
    before = executor.submit(one.plan(ids[0]))
    executor.submit(other.plan(ids[1]), after=before, priority=priority).synchronize(PATIENCE)
    for pair in (one, other):
        pair.check()


@pytest.mark.parametrize("path", ["copy_engine", "copy_engine_2d"])
@both_ways
def test_a_short_transfer_does_not_overtake_the_calls_of_a_long_one(
    simulated: Simulated, path: str, route: str
) -> None:  # fmt: skip
    forms = Paged(DEVICE_NOTATION, block=60, dim=16, padded=True), Paged(PAGE_FIRST, block=60, dim=16)
    executor, pair = simulated.executor(path), way(simulated, route, *forms)
    pair.warm(executor)
    simulated.driver.slow |= {"cuMemcpyAsync", "cuMemcpyBatchAsync", "cuMemcpy2DAsync_v2"}
    ids = np.random.default_rng(3).permutation(60)[:50].tolist()
    executor.submit(pair.plan(Ids(range(50), ids)))
    executor.submit(pair.plan(Ids([55], ids[-1:]))).synchronize(PATIENCE)
    pair.check()


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_executors_and_transfers_of_a_parent_say_so_in_its_child(simulated: Simulated) -> None:
    executor, pair, happened = simulated.executor("kernel"), way(simulated, "load"), threading.Event()
    pair.warm(executor)
    flying = executor.submit(pair.plan(), after=happened)
    ask, answer = multiprocessing.Pipe(duplex=False)
    calls = [lambda: executor.submit(pair.program.plan([1], [2])), flying.done, flying.synchronize, flying.cancel]
    child = os.fork()
    if not child:
        for call in calls:
            try:
                answer.send(str(call()))
            except kvplan.TransferError as error:
                answer.send(str(error))
        executor.close()
        os._exit(0)
    for _ in calls:
        assert ask.poll(PATIENCE), "it hangs"
        assert "do not survive a fork" in ask.recv()
    assert os.waitpid(child, 0)[1] == 0
    happened.set()
    flying.synchronize(PATIENCE)
    pair.check()


@pytest.mark.parametrize("path", [*PATHS, "auto"])
@both_ways
@pytest.mark.parametrize("by_layer", [False, True])
def test_what_is_prepared_compiles_nothing_later_and_moves_nothing(
    simulated: Simulated, path: str, route: str, by_layer: bool
) -> None:  # fmt: skip
    """For plans of the same program, of any size."""
    executor, pair, driver = simulated.executor(path), way(simulated, route), simulated.driver
    executor.prepare(pair.program.plan([0], [0]), by_layer=by_layer)
    executor.prepare()
    pair.check()
    assert executor.stats().transfers == 0
    compiled = driver.calls.count("cuModuleLoadData")
    for ids in (MOVE, Ids([5], [6]), Ids(range(9), range(9))):
        executor.submit(pair.plan(ids), by_layer=by_layer).synchronize(PATIENCE)
    assert driver.calls.count("cuModuleLoadData") == compiled
    pair.check()


@pytest.mark.parametrize("path", ["kernel", "staged"])
def test_what_a_submit_would_refuse_is_refused_when_it_is_prepared(gpu: Machine, path: str) -> None:
    pair = way(gpu, "pageable load")
    with pytest.raises(kvplan.HostMemoryError, match="is not pinned"):
        gpu.executor(path).prepare(pair.program.plan([0], [0]))


def test_another_library_may_have_enabled_a_peer(simulated: Simulated) -> None:
    simulated.driver.fail("cuCtxEnablePeerAccess", code=704)
    simulated.driver._reached.add((0, 1))
    pair = way(simulated, "pull")
    simulated.executor("kernel").submit(pair.plan()).synchronize(PATIENCE)
    pair.check()


def test_access_to_a_peer_that_fails_once_may_succeed_later(simulated: Simulated) -> None:
    pair, executor = way(simulated, "push"), simulated.executor("kernel")
    simulated.driver.fail("cuCtxEnablePeerAccess", code=2)
    with pytest.raises(PathError, match="cannot reach the memory of cuda:1"):
        executor.submit(pair.program.plan(*MOVE))
    executor.submit(pair.plan()).synchronize(PATIENCE)
    pair.check()


@pytest.mark.parametrize("call", ["cuModuleLoadData", "cuModuleGetFunction"])
def test_a_kernel_that_does_not_load_is_loaded_by_the_next_transfer(simulated: Simulated, call: str) -> None:
    pair, executor = way(simulated, "load"), simulated.executor("kernel")
    simulated.driver.fail(call)
    with pytest.raises(kvplan.TransferError, match=call):
        executor.submit(pair.program.plan(*MOVE))
    assert "modules" not in simulated.driver.left()
    executor.submit(pair.plan()).synchronize(PATIENCE)
    pair.check()
