"""Promises beside those of order, layers and errors: the caller's streams, memory, choices, forks; results and sums."""

from __future__ import annotations

import multiprocessing
import os

import numpy as np
import pytest

import kvplan
from tests.contract.gpu.caches import MOVE, SERVED, Ids, both_ways, each_way, every_path, forms, way
from tests.contract.gpu.favouring import drawn, favouring
from tests.contract.gpu.machines import PATIENCE, Simulated

LONG = forms(block=60, dim=16)  # hundreds of calls
COPIES = {"cuMemcpyAsync", "cuMemcpyBatchAsync", "cuMemcpy2DAsync_v2"}
PATHS = ("kernel", "staged", "copy_engine", "copy_engine_2d")


@both_ways
@pytest.mark.parametrize("path", ["kernel", "staged"])
@pytest.mark.parametrize("by_layer", [False, True])
def test_kernels_run_on_the_stream_that_the_caller_lends(gpu, path, by_layer, pair):
    lent, asked = gpu.stream(), list[None]()
    executor = gpu.executor(path, kernel_stream=lambda: (asked.append(None), lent)[1])
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


def test_a_function_that_returns_no_stream(gpu, pair):
    returned = [7]
    executor = gpu.executor("kernel", kernel_stream=lambda: returned[0])
    with pytest.raises(kvplan.PathError, match="the function kernel_stream returned 7"):
        executor.submit(pair.program.plan(*MOVE))
    returned[0] = None
    executor.submit(pair.plan()).synchronize(PATIENCE)
    pair.check()


@every_path
def test_many_submits_take_no_more_memory_than_the_first(simulated, executor, pair):
    """Also of a caller that asks for no result."""
    plan = pair.plan()

    def held():
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
def test_a_ring_takes_no_byte_more_than_the_policy_allows(simulated, route, most):
    executors = [simulated.executor("kernel"), simulated.executor("staged", staging_bytes=most)]
    held = [0]
    for executor in executors:
        pair = way(simulated, route)
        executor.submit(pair.plan()).synchronize(PATIENCE)
        pair.check()
        held.append(simulated.driver.left()["bytes"])
    slack = 1 << 20  # a block of slots or tables
    assert held[2] - held[1] <= most + held[1] + slack


def test_a_block_larger_than_the_ring_is_refused_and_named(gpu):
    pair = way(gpu, "load", forms(dim=96)[0], forms(dim=96, token=6)[1])
    with pytest.raises(kvplan.PathError, match=r"staging_bytes is 1024; a block here takes \d+ bytes of the ring"):
        gpu.executor("staged", staging_bytes=1024).submit(pair.program.plan([1], [2, 4, 5]))
    executor = gpu.executor(staging_bytes=1024, profile=favouring("staged"))
    candidates = executor.candidates(pair.program.plan([1], [2, 4, 5]))
    assert [bool(each.refused) for each in candidates] == [False, False, False, True]
    assert "staging_bytes is 1024" in candidates[-1].refused


@both_ways
@pytest.mark.parametrize("by_layer", [False, True])
@pytest.mark.parametrize("own", [*PATHS, "drawn", None])
def test_auto_takes_the_first_candidate_of_the_model(gpu, route, by_layer, own):
    """A profile may make one path the cheapest, or another for each number of blocks, or be the machine's own."""
    notation, rng, taken = "layer block kv token head dim", np.random.default_rng(1), set()
    pair = way(gpu, route, *forms(notation, notation, padded=False, block=64, dim=256))
    for seed in range(8 if own == "drawn" else 1):
        executor = gpu.executor(profile=drawn(seed) if own == "drawn" else own and favouring(own))
        for count in (1, 2, 5, 9, 24, 47):
            first = int(rng.integers(0, 16))
            rising = np.arange(first, first + count)
            ids = [rising if rng.random() < 0.5 else rng.permutation(64)[:count] for _ in range(2)]
            plan = pair.plan(Ids(*(each.tolist() for each in ids)))
            best = executor.candidates(plan, by_layer=by_layer)[0]
            result = executor.submit(plan, by_layer=by_layer).result()
            assert (result.path, result.predicted) == (best.path, pytest.approx(best.seconds))
            assert own in (None, "drawn", result.path)
            taken.add(result.path)
    assert len(taken) > 1 or own != "drawn", "some profile changes the path"
    pair.check()


def test_pageable_memory_is_looked_at_again_once_it_is_pinned(simulated):
    pair, executor = way(simulated, "pageable load"), simulated.executor(profile=favouring("kernel"))
    assert executor.submit(pair.plan()).result().path == "copy_engine"
    for memory in pair.sources:
        simulated.driver.pin(memory.root)
    assert executor.submit(pair.plan()).result().path == "kernel"
    pair.check()


@each_way
@pytest.mark.parametrize("late", [False, True])
def test_an_event_counts_as_it_was_recorded_at_the_submit(simulated, route, late, executor, pair, happened):
    """However late the transfer is issued, and whatever its owner records on the event since."""
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
def test_an_after_may_close_the_executor(executor, pair):
    class Closes:
        def synchronize(self) -> None:
            executor.close()

    executor.submit(pair.plan(), after=Closes()).synchronize(PATIENCE)
    with pytest.raises(kvplan.TransferError, match="closed"):
        executor.submit(pair.program.plan([1], [2]))
    pair.check()


@pytest.mark.parametrize("priority", ["normal", "high"])
def test_a_transfer_after_one_that_fails_later_fails_too(simulated, priority):
    executor, ids = simulated.executor("copy_engine"), Ids(range(50), range(50))
    load, store = (way(simulated, route, *LONG) for route in ("load", "store"))
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
def test_a_transfer_whose_calls_are_still_being_made_is_waited_for(simulated, path, first, priority):
    """A stream that waits for an event before its record would wait for nothing."""
    executor, one = simulated.executor(path), way(simulated, first, *LONG)
    other = way(simulated, "store" if first == "load" else "load", *LONG, seed=5).behind(one)
    for pair in (one, other):
        pair.warm(executor)
    simulated.driver.slow |= COPIES
    ids = [Ids(*(np.random.default_rng(seed + k).permutation(60)[:50].tolist() for k in (0, 9))) for seed in (1, 2)]
    before = executor.submit(one.plan(ids[0]))
    executor.submit(other.plan(ids[1]), after=before, priority=priority).synchronize(PATIENCE)
    for pair in (one, other):
        pair.check()


@pytest.mark.parametrize("path", ["copy_engine", "copy_engine_2d"])
@both_ways
def test_a_short_transfer_does_not_overtake_the_calls_of_a_long_one(simulated, path, route):
    executor, pair = simulated.executor(path), way(simulated, route, *LONG)
    pair.warm(executor)
    simulated.driver.slow |= COPIES
    ids = np.random.default_rng(3).permutation(60)[:50].tolist()
    executor.submit(pair.plan(Ids(range(50), ids)))
    executor.submit(pair.plan(Ids([55], ids[-1:]))).synchronize(PATIENCE)
    pair.check()


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_executors_and_transfers_of_a_parent_say_so_in_its_child(simulated, pair, happened):
    executor = simulated.executor("kernel")
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


def test_another_library_may_have_enabled_a_peer(simulated):
    simulated.driver.fail("cuCtxEnablePeerAccess", code=704)
    simulated.driver._reached.add((0, 1))
    pair = way(simulated, "pull")
    simulated.executor("kernel").submit(pair.plan()).synchronize(PATIENCE)
    pair.check()


def test_access_to_a_peer_that_fails_once_may_succeed_later(simulated):
    pair, executor = way(simulated, "push"), simulated.executor("kernel")
    simulated.driver.fail("cuCtxEnablePeerAccess", code=2)
    with pytest.raises(kvplan.PathError, match="cannot reach the memory of cuda:1"):
        executor.submit(pair.program.plan(*MOVE))
    executor.submit(pair.plan()).synchronize(PATIENCE)
    pair.check()


@pytest.mark.parametrize("call", ["cuModuleLoadData", "cuModuleGetFunction"])
def test_a_kernel_that_does_not_load_is_loaded_by_the_next_transfer(simulated, call, pair):
    executor = simulated.executor("kernel")
    simulated.driver.fail(call)
    with pytest.raises(kvplan.TransferError, match=call):
        executor.submit(pair.program.plan(*MOVE))
    assert "modules" not in simulated.driver.left()
    executor.submit(pair.plan()).synchronize(PATIENCE)
    pair.check()


@each_way
def test_results_say_what_was_done_and_sums_are_those_of_all(path, route, executor, pair):
    assert executor.stats().transfers == executor.stats().in_flight == 0
    transfers = [executor.submit(pair.plan(Ids([k], [8 - k]))) for k in range(5)]
    results = [transfer.result() for transfer in transfers]
    for transfer, result in zip(transfers, results, strict=True):
        nbytes, seconds, taken, descriptors, launches = result
        assert transfer.done()
        assert nbytes == transfer.plan.nbytes == result.nbytes
        assert taken == path if path != "auto" else taken in PATHS
        assert seconds >= 0
        assert min(descriptors, launches) > 0
        assert transfer.result() == result
    stats = executor.stats()
    assert (stats.transfers, stats.failed, stats.cancelled, stats.in_flight) == (5, 0, 0, 0)
    for name in ("nbytes", "descriptors", "launches"):
        assert getattr(stats, name) == sum(getattr(each, name) for each in results)
        assert getattr(stats, name) == sum(getattr(each, name) for each in stats.paths.values())
    assert stats.seconds == pytest.approx(sum(result.seconds for result in results))
    assert {way for _, way in stats.flows} == {route}
    pair.check()


def test_in_flight_counts_what_has_not_ended(gpu, pair, stream):
    executor = gpu.executor("kernel")
    pair.warm(executor)
    with gpu.hold(stream) as gate:
        flying = [executor.submit(pair.plan(Ids([k], [k])), after=stream) for k in range(3)]
        assert executor.stats().in_flight == 3
        gate.open()
        for transfer in flying:
            transfer.synchronize(PATIENCE)
    assert executor.stats().in_flight == 0
    pair.check()


@pytest.mark.parametrize("route", [route for route in SERVED["auto"] if "pageable" not in route])
@pytest.mark.parametrize("by_layer", [False, True])
def test_auto_takes_its_first_candidate(executor, pair, route, by_layer):
    plan = pair.plan()
    every = executor.candidates(plan, by_layer=by_layer)
    assert {one.path for one in every} == {*PATHS}
    serving = [one for one in every if not one.refused]
    assert [bool(one.refused) for one in every] == sorted(bool(one.refused) for one in every)  # refused ones last
    assert {one.path for one in serving} == {path for path in PATHS if route in SERVED[path]}
    result = executor.submit(plan, by_layer=by_layer).result()
    assert result.path == every[0].path
    assert result.predicted == every[0].seconds > 0
    assert executor.stats().predicted == 1
    assert executor.stats().prediction_error >= 0
    pair.check()


@each_way
@pytest.mark.parametrize("by_layer", [False, True])
def test_what_is_prepared_compiles_nothing_later_and_moves_nothing(gpu, executor, pair, by_layer):
    """For plans of the same program, of any size."""
    executor.prepare()
    executor.prepare(pair.program.plan([0], [0]), by_layer=by_layer)
    assert executor.stats().transfers == 0
    pair.check()
    calls = gpu.driver.calls if isinstance(gpu, Simulated) else []
    compiled = calls.count("cuModuleLoadData")
    for ids in (MOVE, Ids([5], [6]), Ids(range(9), range(9))):
        executor.submit(pair.plan(ids), by_layer=by_layer).synchronize(PATIENCE)
    assert calls.count("cuModuleLoadData") == compiled
    pair.check()


@pytest.mark.parametrize(
    ("path", "route", "words"),
    [
        ("kernel", "pageable load", "is not pinned"),
        ("staged", "pageable load", "is not pinned"),
        ("staged", "device", "stag"),
    ],
)
def test_prepare_refuses_what_submit_would(executor, pair, words):
    with pytest.raises(kvplan.KVPlanError, match=words):
        executor.prepare(pair.program.plan([0], [0]))
    pair.check()
