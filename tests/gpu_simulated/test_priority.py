"""Transfers of a GPU that go first, and transfers that are taken back, on a device whose streams go on in any order."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import kvplan
from kvplan import PathError, TransferError
from kvplan.cuda.handles import kernel_streams
from kvplan.execute.gpu.resources import Limits
from tests.paged_caches import Move
from tests.patience import PATIENCE
from tests.simulated import Device, Stream
from tests.simulated.executors import (
    MOVE,
    PATHS,
    TIGHT,
    both_ways,
    every_path,
    executor_on,
    pair_on,
    paths_in_turn,
)
from tests.simulated.overwrites import TINY_RING


@both_ways
@pytest.mark.parametrize("seed", range(16))
def test_what_was_submitted_last_is_what_stays_whatever_the_priorities(direction, seed):
    """Each overwrites some blocks of those before it; a missing wait shows as bytes of an earlier one."""
    device = Device(seed, eager=False)
    rng = np.random.default_rng(seed)
    names = [str(name) for name in rng.choice(PATHS, 16)]
    pair = pair_on(device, direction)
    tight = TIGHT if seed % 2 else {}
    with executor_on(device, limits=Limits(**(TINY_RING | tight))) as executor, paths_in_turn(names):
        for _ in names:
            move = Move(rng.permutation(9)[:3], rng.permutation(7)[:3])
            executor.submit(pair.plan(move), priority=str(rng.choice(["normal", "high"])))
        device.run()
        pair.check()


@pytest.mark.slow
@every_path
@both_ways
def test_a_high_one_goes_past_what_waits_on_the_cpu(path, direction):
    device = Device()
    pair = pair_on(device, direction)
    gate = threading.Event()
    with executor_on(device, path) as executor:
        held = executor.submit(pair.plan(Move([3, 1], [0, 7])), after=gate)
        behind = executor.submit(pair.plan(Move([2], [6])))
        high = executor.submit(pair.plan(Move([4], [2])), priority="high")
        high.synchronize(PATIENCE)
        assert not held.done()
        assert not behind.done()
        gate.set()
        behind.synchronize(PATIENCE)
        pair.check()


@both_ways
def test_a_high_one_goes_past_what_waits_on_the_gpu(direction):
    device = Device()
    pair = pair_on(device, direction)
    with executor_on(device, "kernel") as executor:
        user = device.stream()
        gate = device.gate(user)
        held = executor.submit(pair.plan(Move([3], [0])), after=Stream(user))
        high = executor.submit(pair.plan(Move([4], [2])), priority="high")
        second = executor.submit(pair.plan(Move([5], [0])), priority="high")
        last = executor.submit(pair.plan(Move([6], [1])), priority="high")
        device.run()
        assert high.done()
        assert not held.done()
        assert not second.done()  # it writes what the held one writes
        assert not last.done()  # high ones keep their order
        gate.set()
        device.run()
        assert last.done()
        pair.check()


@both_ways
@pytest.mark.parametrize("first", ["normal", "high"])
def test_what_conflicts_waits_for_what_is_not_yet_issued(direction, first):
    device = Device()
    pair = pair_on(device, direction)
    gate = threading.Event()
    second = {"normal": "high", "high": "normal"}[first]
    with executor_on(device, "kernel") as executor:
        one = executor.submit(pair.plan(Move([3], [0])), after=gate, priority=first)
        other = executor.submit(pair.plan(Move([4], [0])), priority=second)
        assert not other.done()
        gate.set()
        for transfer in (one, other):
            transfer.synchronize(PATIENCE)
        pair.check()


def test_streams_of_high_ones_are_of_the_highest_priority():
    device = Device()
    made, stream = [], device.stream

    def watched(*, urgent=False):
        made.append(urgent)
        return stream(urgent=urgent)

    device.stream = watched
    pair = pair_on(device, "load")
    with executor_on(device, "copy_engine") as executor:
        executor.submit(pair.plan(MOVE)).synchronize()
        assert made == [False]
        executor.submit(pair.plan(MOVE), priority="high").synchronize()
        assert made == [False, True]
        pair.check()


@pytest.mark.parametrize(("priority", "urgent"), [("high", True), ("normal", False)])
@pytest.mark.parametrize("path", ["kernel", "staged"])
def test_streams_of_kernels_have_the_priority_that_the_caller_gives(path, priority, urgent):
    device = Device()
    made, stream, launched = {}, device.stream, []

    def watched(*, urgent=False):
        handle = stream(urgent=urgent)
        made[handle] = urgent
        return handle

    device.stream = watched
    pair = pair_on(device, "load")
    kernels = kernel_streams(None, priority)
    with executor_on(device, path, kernels=kernels) as executor:
        for one in ("normal", "high"):
            executor.submit(pair.plan(MOVE), priority=one).synchronize()
        launched = [made[handle] for handle in device.launched_on]
    assert launched
    assert set(launched) == {urgent}
    pair.check()


def test_an_unknown_priority_of_kernels_is_refused():
    with pytest.raises(PathError, match="kernel_priority is 'low'; expected one of normal, high"):
        kvplan.Executor("cpu", kernel_priority="low")


def test_a_graph_has_no_priority():
    device = Device()
    pair = pair_on(device, "load")
    with executor_on(device, "kernel") as executor:
        stream = device.stream()
        device.capture(stream)
        with pytest.raises(PathError, match="high priority cannot be captured"):
            executor.submit(pair.plan(MOVE), after=Stream(stream), priority="high")
        transfer = executor.submit(pair.plan(MOVE), after=Stream(stream))
        with pytest.raises(TransferError, match=r"cancel\(\) of a transfer that was captured"):
            transfer.cancel()
        transfer.wait(Stream(stream))
        device.end_capture()


@every_path
@both_ways
@pytest.mark.parametrize("priority", ["normal", "high"])
def test_one_that_waits_for_what_never_comes_is_taken_back_and_those_behind_go_on(path, direction, priority):
    device = Device()
    pair = pair_on(device, direction)
    gate = threading.Event()
    with executor_on(device, path) as executor:
        waiting = executor.submit(plan_only(pair, Move([1], [1])), after=gate, priority=priority)
        behind = executor.submit(pair.plan(Move([2], [6])), priority=priority)
        queued = executor.submit(plan_only(pair, Move([3], [3])), after=gate, priority=priority)
        also = executor.submit(plan_only(pair, Move([5], [5])), priority=priority)
        assert also.cancel()
        assert waiting.cancel()
        behind.synchronize(PATIENCE)
        assert queued.cancel()
        executor.submit(pair.plan(Move([4], [2])), priority=priority).synchronize(PATIENCE)
        for transfer in (waiting, queued, also):
            assert transfer.done()
            assert transfer.cancel()
            assert repr(transfer).endswith("cancelled)")
            for call in (transfer.synchronize, transfer.result, lambda t=transfer: t.wait(Stream(device.stream()))):
                with pytest.raises(TransferError, match="was cancelled before it began; nothing was moved"):
                    call()
        gate.set()
        executor.submit(pair.plan(Move([7], [7])), priority=priority).synchronize(PATIENCE)
        pair.check()
        stats = executor.stats()
        assert (stats.transfers, stats.cancelled, stats.failed) == (3, 3, 0)


def plan_only(pair, move):
    """A plan of which nothing is expected."""
    return pair.program.plan(list(move.src), list(move.dst))


@every_path
def test_what_was_given_to_the_gpu_is_not_taken_back(path):
    device = Device(eager=False)
    pair = pair_on(device, "load")
    with executor_on(device, path) as executor:
        transfer = executor.submit(pair.plan(MOVE))
        assert not transfer.cancel()
        device.run()
        assert not transfer.cancel()
        pair.check()


def test_what_conflicts_with_a_cancelled_one_goes_on():
    device = Device()
    pair = pair_on(device, "load")
    with executor_on(device, "kernel") as executor:
        first = executor.submit(plan_only(pair, Move([1], [5])), after=threading.Event())
        second = executor.submit(pair.plan(Move([2], [5])), priority="high")
        assert first.cancel()
        second.synchronize(PATIENCE)
        pair.check()


def test_what_named_a_cancelled_one_is_refused_or_fails():
    device = Device()
    pair = pair_on(device, "load")
    with executor_on(device, "kernel") as executor:
        first = executor.submit(plan_only(pair, Move([1], [1])), after=threading.Event())
        second = executor.submit(plan_only(pair, Move([2], [2])), after=first)
        first.cancel()
        with pytest.raises(TransferError, match="was cancelled"):
            second.synchronize(PATIENCE)
        with pytest.raises(TransferError, match="was cancelled"):
            executor.submit(plan_only(pair, Move([3], [3])), after=first)


def test_one_whose_after_is_not_issued_is_taken_back_and_those_behind_go_on():
    device = Device()
    pair, back = pair_on(device, "load"), pair_on(device, "store")
    gate = threading.Event()
    with executor_on(device, "kernel") as executor:
        store = executor.submit(back.plan(Move([1], [1])), after=gate)
        load = executor.submit(plan_only(pair, Move([2], [2])), after=store)
        behind = executor.submit(pair.plan(Move([3], [6])))
        while executor._backend.lanes["load"].waiting is None:  # its turn has come
            pass
        assert load.cancel()
        behind.synchronize(PATIENCE)
        assert not store.done()
        gate.set()
        store.synchronize(PATIENCE)
        pair.check()
        back.check()
        stats = executor.stats()
        assert (stats.transfers, stats.cancelled, stats.in_flight) == (2, 1, 0)


def start_if(monkeypatch, name, allowed):
    """Threads of a name start only where ``allowed()`` is true."""
    start = threading.Thread.start

    def watched(thread):
        if thread.name != name or allowed():
            start(thread)
        else:
            raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", watched)


def test_without_a_thread_to_issue_it_a_transfer_is_refused_and_the_next_goes_on(monkeypatch):
    device = Device()
    pair = pair_on(device, "load")
    with executor_on(device, "kernel") as executor:
        start_if(monkeypatch, "kvplan-load", lambda: False)
        with pytest.raises(TransferError, match="no thread issues a transfer of 768 bytes: can't start new thread"):
            executor.submit(plan_only(pair, Move([1], [1])), after=threading.Event())
        monkeypatch.undo()
        executor.submit(pair.plan(Move([2], [6]))).synchronize(PATIENCE)
        pair.check()
        stats = executor.stats()
        assert (stats.transfers, stats.failed, stats.in_flight) == (1, 1, 0)


def test_a_close_does_not_wait_for_what_was_taken_back():
    device = Device()
    pair = pair_on(device, "store")
    gate = threading.Event()
    with executor_on(device, "kernel") as executor:
        held = [executor.submit(plan_only(pair, Move([k], [k])), after=gate) for k in range(3)]
        for transfer in held:
            assert transfer.cancel()
    gate.set()
    assert isinstance(executor, kvplan.Executor)
