"""What is in flight keeps itself alive and finishes, whatever the caller drops or closes; what is done lets go."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import pytest

from tests.contract.gpu.caches import Ids, assert_same_bytes, both_ways, each_way, every_path, way
from tests.contract.gpu.machines import PATIENCE

ROOT = Path(__file__).parents[3]


def until(condition, why):
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, why
        gc.collect()
        time.sleep(0.02)


def tensors_of(pair):
    held = [layout.tensors for layout in pair.layouts]
    return [weakref.ref(tensor) for some in held for tensor in (some if isinstance(some, list) else [some])]


@each_way
def test_tensors_that_the_caller_drops_live_until_the_end(gpu, path, route):
    executor, pair, stream = gpu.executor(path), way(gpu, route), gpu.stream()
    pair.warm(executor)
    with gpu.hold(stream) as gate:
        executor.submit(pair.plan(), after=stream)
        references, targets, due = tensors_of(pair), pair.targets, pair.dst_bytes
        del pair
        gc.collect()
        assert all(reference() is not None for reference in references)
        gate.open()
        until(lambda: all(reference() is None for reference in references), "an ended transfer keeps tensors alive")
    assert_same_bytes([memory.bytes() for memory in targets], due)


@both_ways
def test_transfers_keep_none_of_those_that_they_followed(simulated, route):
    """Blocks of more than a quarter of the ring, of both priorities: each transfer follows the one before."""
    executor, pair = simulated.executor("staged", staging_bytes=3 << 10), way(simulated, route)
    pair.warm(executor)
    flying = [executor.submit(pair.plan(Ids([k], [k])), priority=("normal", "high")[k % 2]) for k in range(9)]
    references, last = [weakref.ref(transfer) for transfer in flying], flying[-1]
    del flying
    last.synchronize(PATIENCE)
    until(lambda: sum(reference() is not None for reference in references) == 1, "an ended transfer is kept")
    pair.check()


@each_way
def test_a_transfer_that_has_ended_keeps_nothing(gpu, path, route):
    executor, pair = gpu.executor(path), way(gpu, route)
    transfer = executor.submit(pair.plan(), by_layer=True)
    transfer.synchronize(PATIENCE)
    pair.check()
    references = tensors_of(pair)
    del pair, transfer
    until(lambda: all(reference() is None for reference in references), "an ended transfer keeps tensors alive")


@each_way
def test_an_executor_that_is_dropped_finishes(gpu, path, route):
    before = set(threading.enumerate())
    executor, pair, stream = gpu.executor(path), way(gpu, route), gpu.stream()
    pair.warm(executor)
    mine = set(threading.enumerate()) - before
    assert mine
    with gpu.hold(stream) as gate:
        transfer = executor.submit(pair.plan(), after=stream)
        gpu.executors.clear()
        reference = weakref.ref(executor)
        del executor
        gc.collect()  # blocks nobody
        until(lambda: reference() is None, "a transfer in flight keeps its executor alive")
        assert not transfer.done()
        gate.open()
        transfer.synchronize(PATIENCE)
    pair.check()
    until(lambda: not any(thread.is_alive() for thread in mine), "a thread of a dropped executor goes on")


@each_way
@pytest.mark.parametrize("closers", [1, 2])
def test_close_waits_for_what_was_submitted(gpu, closers, executor, pair, stream, happened):
    pair.warm(executor)
    with gpu.hold(stream) as gate:
        flying = [executor.submit(pair.plan(Ids([k], [8 - k])), after=stream) for k in range(8)]
        flying.append(executor.submit(pair.plan(), after=happened))
        threads = [threading.Thread(target=executor.close) for _ in range(closers)]
        for thread in threads:
            thread.start()
        assert not flying[0].done()
        gate.open()
        happened.set()
        for thread in threads:
            thread.join(PATIENCE)
            assert not thread.is_alive(), "close hangs"
    assert all(transfer.done() for transfer in flying)
    pair.check()
    assert [transfer.result().nbytes for transfer in flying] == [transfer.plan.nbytes for transfer in flying]
    executor.close()
    pair.check()


@every_path
def test_executors_come_and_go_and_leave_no_thread(gpu, path, pair):
    before = threading.active_count()
    for k in range(6):
        with gpu.executor(path) as executor:
            executor.submit(pair.plan(Ids([k], [8 - k])))
    until(lambda: threading.active_count() <= before, "closed executors keep threads")
    pair.check()


@pytest.mark.parametrize("path", ["kernel", "staged"])
def test_a_normal_exit_finishes_what_was_submitted(gpu, path):
    command = [sys.executable, "-m", "tests.contract.gpu.leaving", type(gpu).__name__, path, "store"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=10 * PATIENCE, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "arrived\n", "")
