"""A transfer begins after what it was told to wait for, and streams and transfers can wait for it.

Streams work late: a wait that is missing shows as old bytes where new ones are due.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

import kvplan
from tests.contract.gpu.caches import (
    DEVICE_NOTATION,
    MOVE,
    PAGE_FIRST,
    Ids,
    Paged,
    assert_same_bytes,
    both_ways,
    every_path,
    way,
)
from tests.contract.gpu.machines import PATIENCE, Machine, Real

awaited = pytest.mark.parametrize("kind", ["stream", "event"])


def after_of(gpu: Machine, stream: Any, kind: str) -> Any:
    return stream if kind == "stream" else gpu.event(stream)


@every_path
@both_ways
@awaited
def test_it_reads_what_a_stream_has_written(gpu: Machine, path: str, route: str, kind: str) -> None:
    executor, pair, stream = gpu.executor(path), way(gpu, route), gpu.stream()
    for seed in range(gpu.rounds):
        pair.renew(stream, pair.fresh(seed))
        executor.submit(pair.plan(), after=after_of(gpu, stream, kind)).synchronize(PATIENCE)
        pair.check()


@every_path
@both_ways
def test_it_writes_after_a_stream_has_read(gpu: Machine, path: str, route: str) -> None:
    executor, pair, stream = gpu.executor(path), way(gpu, route), gpu.stream()
    for seed in range(gpu.rounds):
        seen = [gpu.place(np.zeros(root.nbytes, np.uint8), "cuda:0") for root in pair.targets]
        before = [root.copy() for root in pair.dst_bytes]
        for copy, target in zip(seen, pair.targets, strict=True):
            gpu.copy(stream, copy, target)
        executor.submit(pair.plan(Ids([seed, 8], [5, seed % 4])), after=stream).synchronize(PATIENCE)
        assert_same_bytes([copy.bytes() for copy in seen], before)
        pair.check()


@every_path
@both_ways
@awaited
def test_a_submit_returns_while_it_waits(gpu: Machine, path: str, route: str, kind: str) -> None:
    executor, pair, stream = gpu.executor(path), way(gpu, route), gpu.stream()
    pair.warm(executor)
    fresh = pair.fresh(1)
    with gpu.hold(stream) as gate:
        pair.renew(stream, fresh)
        transfer = executor.submit(pair.plan(), after=after_of(gpu, stream, kind))
        assert not transfer.done()
        with pytest.raises(kvplan.TransferError, match=r"not finished within 0\.01 seconds"):
            transfer.synchronize(timeout=0.01)
        gate.open()
        transfer.synchronize(PATIENCE)
    assert transfer.done()
    pair.check()


@every_path
@both_ways
@pytest.mark.parametrize("waits_on", ["stream", "host"])
def test_a_stream_that_waits_for_it_reads_and_overwrites_afterwards(
    gpu: Machine, path: str, route: str, waits_on: str
) -> None:  # fmt: skip
    """The consumer is told to wait while the producer has not even begun, and the CPU waits for neither."""
    executor, pair = gpu.executor(path), way(gpu, route)
    producer, consumer, happened = gpu.stream(), gpu.stream(), threading.Event()
    pair.warm(executor)
    for seed in range(gpu.rounds):
        seen = [gpu.place(np.zeros(root.nbytes, np.uint8), "cuda:0") for root in pair.targets]
        fresh, junk = pair.fresh(seed), pair.fresh(seed + 100)
        with gpu.hold(producer) as gate:
            pair.renew(producer, fresh)
            transfer = executor.submit(pair.plan(), after=producer)
            if waits_on == "host":  # one that waits for the CPU is behind it
                second = executor.submit(pair.plan(Ids([6], [1])), after=happened)
                opener = threading.Timer(0.02, lambda: (gate.open(), happened.set()))
                opener.start()
                second.wait(consumer)
            transfer.wait(consumer)
            for copy, target in zip(seen, pair.targets, strict=True):
                gpu.copy(consumer, copy, target)
            moved = [root.copy() for root in pair.dst_bytes]
            pair.renew(consumer, junk)
            gate.open()
            gpu.finish(consumer)
        if waits_on == "host":
            opener.join()
            second.synchronize(PATIENCE)
        happened.clear()
        assert_same_bytes([copy.bytes() for copy in seen], moved)
        pair.check()


@every_path
@pytest.mark.parametrize("other", [False, True], ids=["one executor", "two executors"])
def test_a_load_comes_after_the_store_that_it_names(gpu: Machine, path: str, other: bool) -> None:
    one = gpu.executor(path)
    two = gpu.executor("kernel" if path == "auto" else path) if other else one
    store, stream = way(gpu, "store"), gpu.stream()
    there = way(gpu, "load", seed=5).behind(store)
    store.warm(one)
    there.warm(two)
    for seed in range(gpu.rounds):
        fresh = store.fresh(seed)
        with gpu.hold(stream) as gate:
            store.renew(stream, fresh)
            first = one.submit(store.plan(Ids([5, 6, 7], [1, 2, 3])), after=stream)
            second = two.submit(there.plan(Ids([3, 2, 1], [8, 0, seed + 2])), after=first)
            assert not first.done()
            assert not second.done()
            gate.open()
            second.synchronize(PATIENCE)
        assert first.done()
        store.check()
        there.check()


@pytest.mark.parametrize("pageable", [0, 1])
def test_order_holds_between_paths(gpu: Machine, pageable: int) -> None:
    """Pageable and pinned memory are moved by different paths, here into the same blocks of a cache."""
    executor, stream = gpu.executor(), gpu.stream()
    pinned, other = way(gpu, "load"), way(gpu, "pageable load", seed=5)
    other.targets, other.dst_bytes = pinned.targets, pinned.dst_bytes
    other.layouts = other.layouts[0], pinned.layouts[1]
    other.program = kvplan.compile(*other.layouts)
    pairs = (other, pinned) if pageable == 0 else (pinned, other)
    for pair in pairs:
        pair.warm(executor)
    for seed in range(gpu.rounds):
        with gpu.hold(stream) as gate:
            executor.submit(pairs[0].plan(), after=stream)
            last = executor.submit(pairs[1].plan(Ids([seed, 8, 7], [2, 0, 5])))
            gate.open()
            last.synchronize(PATIENCE)
        for pair in pairs:
            pair.check()


@every_path
def test_long_transfers_that_name_each_other(gpu: Machine, path: str) -> None:
    """Some need hundreds of calls of the driver, which another thread makes, late."""
    cache, pool = Paged(DEVICE_NOTATION, block=60, dim=16, padded=True), Paged(PAGE_FIRST, block=60, dim=16)
    executors, rng, consumer = [gpu.executor(path), gpu.executor(path)], np.random.default_rng(3), gpu.stream()
    store = way(gpu, "store", cache, pool)
    load = way(gpu, "load", cache, pool, seed=5).behind(store)
    stream, seen = gpu.stream(), [gpu.place(root, "cuda:0") for root in load.dst_bytes]
    for seed in range(gpu.rounds):
        store.renew(stream, store.fresh(seed))
        last: Any = stream
        for turn, pair in enumerate((store, load, store, load)):
            ids = Ids(*(rng.permutation(60)[:50].tolist() for _ in range(2)))
            priority = ("normal", "high")[int(rng.integers(2))]
            last = executors[turn // 2].submit(pair.plan(ids), after=last, priority=priority)
        last.wait(consumer)
        for copy, target in zip(seen, load.targets, strict=True):
            gpu.copy(consumer, copy, target)
        gpu.finish(consumer)
        assert_same_bytes([copy.bytes() for copy in seen], load.dst_bytes)
    for pair in (store, load):
        pair.check()


@every_path
@both_ways
def test_after_may_be_anything_with_a_wait(gpu: Machine, path: str, route: str) -> None:
    """Such as a ``threading.Event``. A transfer that waits on the CPU delays those behind it."""
    executor, pair, happened = gpu.executor(path), way(gpu, route), threading.Event()
    first = executor.submit(pair.plan(), after=happened)
    second = executor.submit(pair.plan(Ids([7], [MOVE.dst[0]])))  # onto a block of the first
    with pytest.raises(kvplan.TransferError):
        second.synchronize(timeout=0.02)
    assert not first.done()
    happened.set()
    second.synchronize(PATIENCE)
    assert first.done()
    pair.check()


@every_path
@both_ways
@awaited
def test_behind_one_that_waits_on_the_cpu_it_waits_for_what_was_there_at_its_submit(
    gpu: Machine, path: str, route: str, kind: str
) -> None:  # fmt: skip
    executor, pair, other, stream = gpu.executor(path), way(gpu, route), way(gpu, route, seed=9), gpu.stream()
    for seed in range(gpu.rounds):
        happened = threading.Event()
        executor.submit(other.plan(), after=happened)
        pair.renew(stream, pair.fresh(seed))
        transfer = executor.submit(pair.plan(), after=after_of(gpu, stream, kind))
        happened.set()
        transfer.synchronize(PATIENCE)
        pair.check()
    other.check()


@every_path
@both_ways
def test_transfers_of_one_direction_land_in_the_order_of_their_submits(gpu: Machine, path: str, route: str) -> None:
    executor, pair, stream, rng = gpu.executor(path), way(gpu, route), gpu.stream(), np.random.default_rng(7)
    pair.warm(executor)
    with gpu.hold(stream) as gate:
        flying = []
        for k in range(48):
            count = int(rng.integers(1, 6))
            ids = Ids(rng.integers(0, 9, count), rng.permutation(9)[:count])
            flying.append(executor.submit(pair.plan(ids), after=stream if k % 16 == 0 else None))
        assert not flying[0].done()
        gate.open()
        flying[-1].synchronize(PATIENCE)
    assert all(transfer.done() for transfer in flying)
    pair.check()


@every_path
@both_ways
def test_the_other_direction_does_not_wait(gpu: Machine, path: str, route: str) -> None:
    executor, stream = gpu.executor(path), gpu.stream()
    held, free = way(gpu, route), way(gpu, "load" if route == "store" else "store", seed=9)
    held.warm(executor)
    free.warm(executor)
    with gpu.hold(stream) as gate:
        first = executor.submit(held.plan(), after=stream)
        executor.submit(free.plan()).synchronize(PATIENCE)
        assert not first.done()
        free.check()
        gate.open()
        first.synchronize(PATIENCE)
    held.check()


@every_path
@both_ways
@pytest.mark.parametrize("waits_on", ["stream", "host"])
def test_high_priority_overtakes_what_has_not_begun(gpu: Machine, path: str, route: str, waits_on: str) -> None:
    executor, pair, stream, happened = gpu.executor(path), way(gpu, route), gpu.stream(), threading.Event()
    pair.warm(executor)
    executor.submit(pair.plan(Ids([2], [2])), priority="high").synchronize(PATIENCE)
    with gpu.hold(stream) as gate:
        held = executor.submit(pair.plan(Ids([3], [0])), after=stream if waits_on == "stream" else happened)
        behind = executor.submit(pair.plan(Ids([2], [6])))
        executor.submit(pair.plan(Ids([4, 7], [3, 8])), priority="high").synchronize(PATIENCE)
        assert not held.done()
        assert not behind.done()
        gate.open()
        happened.set()
        behind.synchronize(PATIENCE)
    pair.check()


@every_path
@both_ways
def test_order_between_priorities_is_by_after(gpu: Machine, path: str, route: str) -> None:
    executor, pair, stream = gpu.executor(path), way(gpu, route), gpu.stream()
    for seed in range(gpu.rounds):
        pair.renew(stream, pair.fresh(seed))
        first = executor.submit(pair.plan(Ids([3, seed], [0, 1])), after=stream)
        urgent = executor.submit(pair.plan(Ids([4, 8], [1, 2])), after=first, priority="high")
        executor.submit(pair.plan(Ids([5], [2])), after=urgent).synchronize(PATIENCE)
        pair.check()


@every_path
@both_ways
def test_what_has_not_begun_can_be_cancelled(gpu: Machine, path: str, route: str) -> None:
    executor, pair, happened = gpu.executor(path), way(gpu, route), threading.Event()
    held = executor.submit(pair.program.plan([3], [0]), after=happened)
    named = executor.submit(pair.program.plan([4], [0]), after=held)
    behind = executor.submit(pair.plan(Ids([2], [6])))
    assert held.cancel()
    behind.synchronize(PATIENCE)
    assert held.done()
    for transfer in (held, named):
        with pytest.raises(kvplan.TransferError, match="cancelled"):
            transfer.synchronize(PATIENCE)
    assert not behind.cancel()
    assert executor.stats().cancelled == 1
    pair.check()


@every_path
def test_threads_submit_at_once_in_both_directions(gpu: Machine, path: str) -> None:
    executor, pairs = gpu.executor(path), [way(gpu, ("load", "store")[k % 2], seed=k) for k in range(4)]
    plans = [[pair.plan(Ids([k, k + 1], [7 - k, 8 - k])) for k in range(8)] for pair in pairs]
    failed: list[BaseException] = []

    def work(mine: list[kvplan.Plan]) -> None:
        try:
            for _ in range(4):
                flying = [executor.submit(plan) for plan in mine]
                for transfer in flying:
                    assert transfer.result().nbytes == transfer.plan.nbytes
        except BaseException as error:  # raised below, in the test's own thread
            failed.append(error)

    threads = [threading.Thread(target=work, args=(mine,)) for mine in plans]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    for pair in pairs:
        pair.check()


@pytest.mark.parametrize("path", ["kernel", "copy_engine", "auto"])
@pytest.mark.parametrize("route", ["push", "pull"])
def test_streams_of_either_gpu_are_waited_for_and_wait(two_gpus: Machine, path: str, route: str) -> None:
    gpu, pair = two_gpus, way(two_gpus, route)
    executor, producer, consumer = gpu.executor(path), gpu.stream(pair.places[0]), gpu.stream(pair.places[1])
    for seed in range(gpu.rounds):
        fresh = pair.fresh(seed)
        seen = [gpu.place(np.zeros(root.nbytes, np.uint8), pair.places[1]) for root in pair.targets]
        pair.renew(producer, fresh)
        transfer = executor.submit(pair.plan(), after=producer)
        transfer.wait(consumer)
        for copy, target in zip(seen, pair.targets, strict=True):
            gpu.copy(consumer, copy, target)
        gpu.finish(consumer)
        assert_same_bytes([copy.bytes() for copy in seen], pair.dst_bytes)
        pair.check()


@every_path
def test_by_default_torch_s_current_stream_waits(gpu: Machine, path: str) -> None:
    if not isinstance(gpu, Real):
        pytest.skip("torch has no stream of a simulated GPU")
    import torch

    executor, pair, producer, consumer = gpu.executor(path), way(gpu, "load"), gpu.stream(), gpu.stream()
    pair.warm(executor)
    fresh = pair.fresh(1)
    seen = [gpu.place(np.zeros(root.nbytes, np.uint8), "cuda:0") for root in pair.targets]
    for copy, target in zip(seen, pair.targets, strict=True):
        gpu.copy(consumer, copy, target)  # torch loads its kernel now: it cannot while a stream is held up
    gpu.finish(consumer)
    with gpu.hold(producer) as gate:
        pair.renew(producer, fresh)
        transfer = executor.submit(pair.plan(), after=producer)
        with torch.cuda.stream(consumer):
            transfer.wait()
        for copy, target in zip(seen, pair.targets, strict=True):
            gpu.copy(consumer, copy, target)
        assert not gpu.event(consumer).query()
        gate.open()
        gpu.finish(consumer)
    assert_same_bytes([copy.bytes() for copy in seen], pair.dst_bytes)
    pair.check()
