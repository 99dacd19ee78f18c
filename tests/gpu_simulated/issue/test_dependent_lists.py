"""Lists of calls that depend on other lists: of another lane, of another direction, or queued before them."""

from __future__ import annotations

import threading

import pytest

import kvplan
from kvplan.cuda.call_list import AWAIT, SYNC
from kvplan.execute.gpu.resources import Limits
from tests.paged_caches import Move
from tests.patience import PATIENCE, until
from tests.simulated import Device, Stream
from tests.simulated.executors import MOVE, executor_on, pair_on, paths_in_turn


class Later:
    """An ``after=`` that only the CPU can wait for."""

    def __init__(self) -> None:
        self.passed = threading.Event()

    def synchronize(self) -> None:
        assert self.passed.wait(PATIENCE)


def test_a_long_queue_of_transfers_that_hold_each_other_gives_everything_back():
    gpu = Device(3, eager=False)
    pair, names = pair_on(gpu, "load"), ["kernel", "copy_engine"] * 400
    with executor_on(gpu, limits=Limits(lane_calls=1 << 40)) as executor, paths_in_turn(names):
        some = [executor.submit(pair.plan(MOVE)) for _ in names]  # each waits for the one before: its path is another
        gpu.run()
        for one in some:
            one.synchronize(PATIENCE)
        pair.check()


def test_groups_of_layers_are_known_before_the_transfer_is_issued():
    gpu = Device(3)
    pair = pair_on(gpu, "load")
    with executor_on(gpu, "copy_engine", limits=Limits(layer_group_nbytes=1)) as executor:
        later = Later()
        transfer = executor.submit(pair.plan(MOVE), after=later, by_layer=True)
        early = transfer.layer_groups
        later.passed.set()
        transfer.synchronize()
        assert early == transfer.layer_groups
        assert len(early) > 1


def test_the_submitting_thread_does_not_wait_for_a_list_of_another_lane():
    gpu = Device(3, eager=False)
    pair, play, me, kinds = pair_on(gpu, "load"), gpu.play, threading.get_ident(), list[int]()
    begin = threading.Event()

    def held(segments, state):
        if threading.get_ident() == me:
            kinds.extend(row[0] for segment in segments for row in segment.rows.tolist())
        else:
            assert begin.wait(PATIENCE)
        play(segments, state)

    gpu.play = held
    with executor_on(gpu, "copy_engine", limits=Limits(inline_effort=12)) as executor:
        first = executor.submit(pair.plan(MOVE))
        assert first.unplayed
        opener = threading.Timer(0.2, begin.set)
        opener.start()
        second = executor.submit(pair.plan(Move([8], [2])), priority="high")  # it writes the same block
        after = executor.submit(pair.plan(Move([0], [6])), after=first, priority="high")
        for one in (first, second, after):
            one.synchronize()
        opener.join()
    assert not {AWAIT, SYNC} & set(kinds)
    pair.check()


@pytest.mark.parametrize("priority", ["normal", "high"])
def test_a_transfer_after_one_whose_list_fails_later_fails_too(priority):
    gpu = Device(3, eager=False)
    loads, stores, play, begin = pair_on(gpu, "load"), pair_on(gpu, "store"), gpu.play, threading.Event()

    def held(segments, state):
        assert begin.wait(PATIENCE)
        play(segments, state)

    gpu.play = held
    with executor_on(gpu, "copy_engine", limits=Limits(inline_effort=0)) as executor:
        for call in ("cuMemcpyAsync", "cuMemcpyBatchAsync"):
            gpu.fail(call)
        first = executor.submit(loads.plan(MOVE))
        behind = executor.submit(loads.plan(MOVE), priority="high")  # it conflicts only, so it need not fail
        stored = executor.submit(stores.plan(MOVE), after=first, priority=priority)
        again = executor.submit(loads.plan(Move([0], [6])), after=stored)
        begin.set()
        with pytest.raises(kvplan.TransferError, match="descriptor"):
            first.synchronize()
        for one in (stored, again):
            with pytest.raises(kvplan.TransferError, match="the transfer given as after= failed"):
                one.synchronize()
        behind.synchronize()


@pytest.mark.parametrize("seed", range(4))
def test_a_transfer_runs_behind_the_copies_of_a_list_that_has_failed(seed):
    gpu = Device(seed, eager=False)
    pair = pair_on(gpu, "load")
    with executor_on(gpu, limits=Limits(inline_effort=12)) as executor, paths_in_turn(["copy_engine", "kernel"]):
        user = gpu.stream()
        gate = gpu.gate(user)
        gpu.fail("cuMemcpyAsync", spare=6)
        first = executor.submit(pair.plan(Move([3, 1, 5], [0, 7, 4])), after=Stream(user))
        until(lambda: not first.unplayed)
        second = executor.submit(pair.plan(Move([8], [0])))
        end = second._end
        until(lambda: gpu.passed[end] < gpu.recorded[end])  # the lane's thread may issue it
        gpu.advance(200)
        assert gpu.passed[end] < gpu.recorded[end]  # the copies before are still in flight
        gate.set()
        second.synchronize()
