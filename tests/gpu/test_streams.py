"""A submit never blocks, and bytes move after what they were told to come after, whatever else is in flight."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

import kvplan
from tests.gpu.flights import MOVE, copy_onto, event_on, small_pair, warm
from tests.gpu.gate import Gate
from tests.paged_caches import Move, assert_same_bytes

pytestmark = pytest.mark.gpu

every_path = pytest.mark.parametrize("path", ["copy_engine", "copy_engine_2d", "kernel", "staged", "auto"])
both_ways = pytest.mark.parametrize("direction", ["load", "store"])
SLEEP_CYCLES = 100_000_000  # 50 ms and more


@every_path
@pytest.mark.parametrize("after", ["stream", "event"])
def test_a_store_comes_after_the_kernels_that_still_write_its_source(path, after, executor_of):
    executor, pair, stream = executor_of(path=path), small_pair("store"), torch.cuda.Stream()
    warm(executor, pair)
    fresh = pair.renew(1)
    with Gate(stream) as gate, torch.cuda.stream(stream):
        copy_onto(pair.src_roots, fresh)
        written = event_on(stream)
        transfer = executor.submit(pair.plan(MOVE), after=stream if after == "stream" else written)
        assert not written.query()  # submit has returned while the GPU is blocked
        assert not transfer.done()
        gate.open()
        transfer.synchronize()
    pair.check()


@every_path
def test_a_store_sees_what_a_running_kernel_writes_last(path, executor_of):
    executor, pair, stream = executor_of(path=path), small_pair("store"), torch.cuda.Stream()
    warm(executor, pair)
    for seed in range(1, 5):
        fresh = pair.renew(seed)
        with torch.cuda.stream(stream):
            torch.cuda._sleep(SLEEP_CYCLES)
            copy_onto(pair.src_roots, fresh)
            transfer = executor.submit(pair.plan(MOVE), after=stream)
        transfer.synchronize()
        pair.check()


@every_path
def test_a_load_does_not_overwrite_what_a_stream_still_reads(path, executor_of):
    executor, pair, stream = executor_of(path=path), small_pair("load"), torch.cuda.Stream()
    warm(executor, pair)
    seen = [torch.zeros_like(root) for root in pair.dst_roots]
    before = [root.copy() for root in pair.dst_bytes]
    torch.cuda.synchronize()
    with Gate(stream) as gate, torch.cuda.stream(stream):
        copy_onto(seen, pair.dst_roots)
        transfer = executor.submit(pair.plan(MOVE), after=stream)
        gate.open()
        transfer.synchronize()
    assert_same_bytes(seen, before)
    pair.check()


@every_path
def test_a_load_comes_after_the_store_of_the_same_host_blocks(path, executor_of):
    executor, store, stream = executor_of(path=path), small_pair("store"), torch.cuda.Stream()
    load = store.onward(store.src, "cuda:0")
    warm(executor, store)
    warm(executor, load)
    with Gate(stream) as gate:
        first = executor.submit(store.plan(Move([5, 6, 7], [1, 2, 3])), after=stream)
        second = executor.submit(load.plan(Move([3, 2, 1], [10, 11, 12])), after=first)
        assert not first.done()
        assert not second.done()
        gate.open()
        second.synchronize()
    assert first.done()
    load.check()


@every_path
@pytest.mark.parametrize("current", [True, False])
def test_a_stream_that_waits_reads_what_was_loaded(path, current, executor_of):
    executor, pair = executor_of(path=path), small_pair("load")
    producer, consumer = torch.cuda.Stream(), torch.cuda.Stream()
    warm(executor, pair)
    seen = [torch.zeros_like(root) for root in pair.dst_roots]
    torch.cuda.synchronize()
    with Gate(producer) as gate:
        transfer = executor.submit(pair.plan(MOVE), after=producer)
        with torch.cuda.stream(consumer):
            transfer.wait(*(() if current else (consumer,)))  # returns: the GPU is still blocked
            copy_onto(seen, pair.dst_roots)
        assert not event_on(consumer).query()
        gate.open()
        consumer.synchronize()  # and not the transfer
        assert_same_bytes(seen, pair.dst_bytes)
    transfer.synchronize()
    pair.check()


@every_path
@both_ways
@pytest.mark.parametrize("held", ["stream", "host"])
def test_loads_and_stores_do_not_queue_behind_each_other(path, direction, held, executor_of):
    """What goes in ``direction`` is held up; what goes the other way overtakes it."""
    executor, stream, happened = executor_of(path=path), torch.cuda.Stream(), threading.Event()
    blocked, free = small_pair(direction), small_pair("load" if direction == "store" else "store", seed=1)
    warm(executor, blocked, free)
    with Gate(stream) as gate:
        first = executor.submit(blocked.plan(MOVE), after=stream if held == "stream" else happened)
        second = executor.submit(free.plan(MOVE))
        second.synchronize(timeout=60)
        assert not first.done()
        free.check()
        happened.set()
        gate.open()
        first.synchronize()
    blocked.check()


@every_path
@both_ways
def test_sixty_four_in_flight_land_in_the_order_of_their_submits(path, direction, executor_of):
    executor, pair, stream = executor_of(path=path), small_pair(direction), torch.cuda.Stream()
    warm(executor, pair)
    rng = np.random.default_rng(7)
    with Gate(stream) as gate:
        flying = []
        for k in range(64):
            ids = rng.permutation(32)[: rng.integers(1, 6)], rng.permutation(32)
            plan = pair.plan(Move(ids[0], ids[1][: len(ids[0])]))
            flying.append(executor.submit(plan, after=stream if k % 16 == 0 else None))
        assert not flying[0].done()
        gate.open()
        for transfer in reversed(flying):
            transfer.synchronize()
    pair.check()


@every_path
def test_both_directions_at_once_arrive_whole(path, executor_of):
    executor, pairs = executor_of(path=path), [small_pair("load"), small_pair("store", seed=1)]
    rng = np.random.default_rng(5)
    flying = []
    for _ in range(32):
        for pair in pairs:
            src, dst = rng.permutation(32)[:16], rng.permutation(32)[:16]
            flying.append(executor.submit(pair.plan(Move(src, dst))))
    assert all(transfer.result().nbytes for transfer in flying)
    for pair in pairs:
        pair.check()


@every_path
@both_ways
def test_two_threads_submit_at_once(path, direction, executor_of):
    executor, pairs = executor_of(path=path), [small_pair(direction, seed=seed) for seed in range(2)]
    plans = [[pair.plan(Move([k, k + 1], [30 - k, 31 - k])) for k in range(0, 30, 2)] for pair in pairs]
    failures = []

    def work(mine: list[kvplan.Plan]) -> None:
        try:
            for _ in range(10):
                flying = [executor.submit(plan) for plan in mine]
                for transfer in flying:
                    transfer.synchronize()
        except Exception as error:  # noqa: BLE001  # told below, in the test's own thread
            failures.append(error)

    threads = [threading.Thread(target=work, args=(mine,)) for mine in plans]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    for pair in pairs:
        pair.check()


@every_path
def test_one_executor_waits_for_another_s_transfer(path, executor_of):
    store, stream = small_pair("store"), torch.cuda.Stream()
    load = store.onward(store.src, "cuda:0")
    one = executor_of(path=path)
    with kvplan.Executor(device="cuda:0", policy=kvplan.Policy(path=path)) as two:
        warm(one, store)
        warm(two, load)
        with Gate(stream) as gate:
            first = one.submit(store.plan(Move([5, 6, 7], [1, 2, 3])), after=stream)
            second = two.submit(load.plan(Move([1, 2, 3], [9, 8, 7])), after=first)
            assert not second.done()
            gate.open()
            second.synchronize()
    load.check()


@every_path
@both_ways
def test_after_may_be_an_event_of_the_host(path, direction, executor_of):
    executor, pair, happened = executor_of(path=path), small_pair(direction), threading.Event()
    warm(executor, pair)
    first = executor.submit(pair.plan(MOVE), after=happened)
    second = executor.submit(pair.plan(Move([20], [MOVE.dst[0]])))  # onto the same block: behind it
    with pytest.raises(kvplan.TransferError):
        first.synchronize(timeout=0.05)
    assert not first.done()
    happened.set()
    second.synchronize()
    assert first.done()
    pair.check()


@every_path
def test_a_stream_waits_for_a_transfer_that_waits_for_the_host(path, executor_of):
    executor, pair = executor_of(path=path), small_pair("load")
    happened, consumer = threading.Event(), torch.cuda.Stream()
    warm(executor, pair)
    seen = [torch.zeros_like(root) for root in pair.dst_roots]
    torch.cuda.synchronize()
    transfer = executor.submit(pair.plan(MOVE), after=happened)
    opener = threading.Timer(0.2, happened.set)
    opener.start()
    with torch.cuda.stream(consumer):
        transfer.wait(consumer)
        copy_onto(seen, pair.dst_roots)
    consumer.synchronize()
    opener.join()
    assert_same_bytes(seen, pair.dst_bytes)
    pair.check()
