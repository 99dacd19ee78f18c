"""A transfer begins after what it was told to wait for, and streams and transfers can wait for it.

Streams work late: a wait that is missing shows as old bytes where new ones are due.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import kvplan
from tests.contract.gpu.caches import MOVE, Ids, each_way, every_path, forms, way
from tests.contract.gpu.machines import PATIENCE, Real

awaited = pytest.mark.parametrize("kind", ["stream", "event"])


def after_of(gpu, stream, kind):
    return stream if kind == "stream" else gpu.event(stream)


@each_way
@awaited
def test_it_reads_what_a_stream_has_written(gpu, executor, pair, stream, kind):
    for seed in range(gpu.rounds):
        pair.renew(stream, pair.fresh(seed))
        executor.submit(pair.plan(), after=after_of(gpu, stream, kind)).synchronize(PATIENCE)
        pair.check()


@each_way
def test_it_writes_after_a_stream_has_read(gpu, executor, pair, stream):
    for seed in range(gpu.rounds):
        before = pair.reader(stream).read()
        executor.submit(pair.plan(Ids([seed, 8], [5, seed % 4])), after=stream).synchronize(PATIENCE)
        before.check()
        pair.check()


@each_way
@awaited
def test_a_submit_returns_while_it_waits(gpu, executor, pair, stream, kind):
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


@each_way
@pytest.mark.parametrize("waits_on", ["stream", "host"])
def test_a_stream_that_waits_for_it_reads_and_overwrites_afterwards(gpu, executor, pair, stream, happened, waits_on):
    """The consumer is told to wait while the producer has not even begun, and the CPU waits for neither."""
    consumer = gpu.stream()
    pair.warm(executor)
    for seed in range(gpu.rounds):
        reader, fresh, junk = pair.reader(consumer), pair.fresh(seed), pair.fresh(seed + 100)
        with gpu.hold(stream) as gate:
            pair.renew(stream, fresh)
            transfer = executor.submit(pair.plan(), after=stream)
            if waits_on == "host":  # one that waits for the CPU is behind it
                second = executor.submit(pair.plan(Ids([6], [1])), after=happened)
                opener = threading.Timer(0.02, lambda: (gate.open(), happened.set()))
                opener.start()
                second.wait(consumer)
            transfer.wait(consumer)
            reader.read()
            pair.renew(consumer, junk)
            gate.open()
            reader.check()
        if waits_on == "host":
            opener.join()
            second.synchronize(PATIENCE)
        happened.clear()
        pair.check()


@every_path
@pytest.mark.parametrize("other", [False, True], ids=["one executor", "two executors"])
def test_a_load_comes_after_the_store_that_it_names(gpu, path, executor, stream, other):
    two = gpu.executor("kernel" if path == "auto" else path) if other else executor
    store = way(gpu, "store")
    there = way(gpu, "load", seed=5).behind(store)
    store.warm(executor)
    there.warm(two)
    for seed in range(gpu.rounds):
        fresh = store.fresh(seed)
        with gpu.hold(stream) as gate:
            store.renew(stream, fresh)
            first = executor.submit(store.plan(Ids([5, 6, 7], [1, 2, 3])), after=stream)
            second = two.submit(there.plan(Ids([3, 2, 1], [8, 0, seed + 2])), after=first)
            assert not first.done()
            assert not second.done()
            gate.open()
            second.synchronize(PATIENCE)
        assert first.done()
        store.check()
        there.check()


@pytest.mark.parametrize("pageable", [0, 1])
def test_order_holds_between_paths(gpu, executor, stream, pageable):
    """Pageable and pinned memory are moved by different paths, here into the same blocks of a cache."""
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
def test_long_transfers_that_name_each_other(gpu, path, stream):
    """Some need hundreds of calls of the driver, which another thread makes, late."""
    cache, pool = forms(block=60, dim=16)
    executors, rng = [gpu.executor(path), gpu.executor(path)], np.random.default_rng(3)
    store = way(gpu, "store", cache, pool)
    load = way(gpu, "load", cache, pool, seed=5).behind(store)
    reader = load.reader(gpu.stream())
    for seed in range(gpu.rounds):
        store.renew(stream, store.fresh(seed))
        last = stream
        for turn, pair in enumerate((store, load, store, load)):
            ids = Ids(*(rng.permutation(60)[:50].tolist() for _ in range(2)))
            priority = ("normal", "high")[int(rng.integers(2))]
            last = executors[turn // 2].submit(pair.plan(ids), after=last, priority=priority)
        last.wait(reader.stream)
        reader.read().check()
    for pair in (store, load):
        pair.check()


@each_way
def test_after_may_be_anything_with_a_wait(executor, pair, happened):
    """Such as a ``threading.Event``. A transfer that waits on the CPU delays those behind it."""
    first = executor.submit(pair.plan(), after=happened)
    second = executor.submit(pair.plan(Ids([7], [MOVE.dst[0]])))  # onto a block of the first
    with pytest.raises(kvplan.TransferError):
        second.synchronize(timeout=0.02)
    assert not first.done()
    happened.set()
    second.synchronize(PATIENCE)
    assert first.done()
    pair.check()


@each_way
@awaited
def test_behind_one_that_waits_on_the_cpu_it_waits_for_what_was_there_at_its_submit(
    gpu, executor, pair, stream, route, kind
):
    other = way(gpu, route, seed=9)
    for seed in range(gpu.rounds):
        happened = threading.Event()
        executor.submit(other.plan(), after=happened)
        pair.renew(stream, pair.fresh(seed))
        transfer = executor.submit(pair.plan(), after=after_of(gpu, stream, kind))
        happened.set()
        transfer.synchronize(PATIENCE)
        pair.check()
    other.check()


@each_way
def test_transfers_of_one_direction_land_in_the_order_of_their_submits(gpu, executor, pair, stream):
    pair.warm(executor)
    rng, flying = np.random.default_rng(7), []
    with gpu.hold(stream) as gate:
        for k in range(48):
            count = int(rng.integers(1, 6))
            ids = Ids(rng.integers(0, 9, count), rng.permutation(9)[:count])
            flying.append(executor.submit(pair.plan(ids), after=stream if k % 16 == 0 else None))
        assert not flying[0].done()
        gate.open()
        flying[-1].synchronize(PATIENCE)
    assert all(transfer.done() for transfer in flying)
    pair.check()


@each_way
def test_the_other_direction_does_not_wait(gpu, executor, pair, stream, route):
    free = way(gpu, "load" if route == "store" else "store", seed=9)
    pair.warm(executor)
    free.warm(executor)
    with gpu.hold(stream) as gate:
        first = executor.submit(pair.plan(), after=stream)
        executor.submit(free.plan()).synchronize(PATIENCE)
        assert not first.done()
        free.check()
        gate.open()
        first.synchronize(PATIENCE)
    pair.check()


@each_way
@pytest.mark.parametrize("waits_on", ["stream", "host"])
def test_high_priority_overtakes_what_has_not_begun(gpu, executor, pair, stream, happened, waits_on):
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


@each_way
def test_order_between_priorities_is_by_after(gpu, executor, pair, stream):
    for seed in range(gpu.rounds):
        pair.renew(stream, pair.fresh(seed))
        first = executor.submit(pair.plan(Ids([3, seed], [0, 1])), after=stream)
        urgent = executor.submit(pair.plan(Ids([4, 8], [1, 2])), after=first, priority="high")
        executor.submit(pair.plan(Ids([5], [2])), after=urgent).synchronize(PATIENCE)
        pair.check()


@each_way
def test_what_has_not_begun_can_be_cancelled(executor, pair, happened):
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
def test_threads_submit_at_once_in_both_directions(gpu, executor):
    pairs = [way(gpu, ("load", "store")[k % 2], seed=k) for k in range(4)]
    plans = [[pair.plan(Ids([k, k + 1], [7 - k, 8 - k])) for k in range(8)] for pair in pairs]

    def work(mine):
        for _ in range(4):
            for transfer in [executor.submit(plan) for plan in mine]:
                assert transfer.result().nbytes == transfer.plan.nbytes

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, plans))
    for pair in pairs:
        pair.check()


@pytest.mark.parametrize("path", ["kernel", "copy_engine", "auto"])
@pytest.mark.parametrize("route", ["push", "pull"])
def test_streams_of_either_gpu_are_waited_for_and_wait(two_gpus, executor, pair):
    producer, consumer = two_gpus.stream(pair.places[0]), two_gpus.stream(pair.places[1])
    for seed in range(two_gpus.rounds):
        fresh, reader = pair.fresh(seed), pair.reader(consumer, pair.places[1])
        pair.renew(producer, fresh)
        transfer = executor.submit(pair.plan(), after=producer)
        transfer.wait(consumer)
        reader.read().check()
        pair.check()


@every_path
def test_by_default_torch_s_current_stream_waits(gpu, executor, pair, stream):
    if not isinstance(gpu, Real):
        pytest.skip("torch has no stream of a simulated GPU")
    import torch

    pair.warm(executor)
    fresh, reader = pair.fresh(1), pair.reader(gpu.stream())
    reader.read().check()  # torch loads its kernel now: it cannot while a stream is held up
    with gpu.hold(stream) as gate:
        pair.renew(stream, fresh)
        transfer = executor.submit(pair.plan(), after=stream)
        with torch.cuda.stream(reader.stream):
            transfer.wait()
        reader.read()
        assert not gpu.event(reader.stream).query()
        gate.open()
        reader.check()
    pair.check()
