"""Waiting on a simulated GPU: for a transfer that failed, an event, a stream of a protocol, and beside a compiler."""

from __future__ import annotations

import threading
from unittest import mock

import pytest

import kvplan
from kvplan.execute.gpu.resources import Limits
from tests.paged_caches import Move
from tests.patience import PATIENCE
from tests.simulated import Device, Event, Stream
from tests.simulated.executors import (
    MOVE,
    both_ways,
    every_path,
    executor_on,
    pair_on,
    paths_in_turn,
    until_issued,
)
from tests.simulated.overwrites import renewal

CALLS = {"copy_engine": "cuMemcpyBatchAsync", "copy_engine_2d": "cuMemcpy2DAsync", "kernel": "cuLaunchKernelEx",
         "staged": "cuLaunchKernelEx", "toy": "cuMemcpyAsync"}  # fmt: skip


class Broken:
    def synchronize(self) -> None:
        raise RuntimeError("it never happened")


class Protocol:
    """A stream that has nothing but what cuda.core's protocol asks for."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._handle


# Order.


@both_ways
@pytest.mark.parametrize("failing", ["prepare", "after"])
@pytest.mark.parametrize("seed", range(6))
def test_a_failed_transfer_stands_in_line_for_those_behind_it(direction, failing, seed):
    device = Device(seed, eager=False)
    pair = pair_on(device, direction)
    names = ["copy_engine", "copy_engine", "kernel", "kernel"]
    with executor_on(device) as executor, paths_in_turn(names):
        broken = executor.submit(pair.program.plan([2], [6]), after=Broken())
        until_issued(broken)
        gate = device.gate(executor._backend.lanes[direction].copy)
        executor.submit(pair.plan(MOVE), after=Stream(device.stream()))
        if failing == "prepare":
            device.fail("cuModuleLoadData")
        with pytest.raises(kvplan.TransferError, match="LoadData" if failing == "prepare" else "never happened"):
            executor.submit(pair.program.plan([2], [6]), after=broken if failing == "after" else None)
        last = executor.submit(pair.plan(Move(MOVE.src[::-1], MOVE.dst)))  # over what the first has moved
        device.run()
        assert not last.done()
        gate.set()
        device.run()
        assert last.done()
        pair.check()


@every_path
@both_ways
def test_to_wait_for_a_transfer_that_failed_raises_before_its_end_has_passed(path, direction):
    device = Device(3, eager=False)
    pair = pair_on(device, direction)
    with executor_on(device, path, limits=Limits(batch_nbytes=0)) as executor:
        happened, user = threading.Event(), Stream(device.stream())
        gate = device.gate(executor._backend.lanes[direction].copy)
        transfer = executor.submit(pair.program.plan(MOVE.src, MOVE.dst), after=happened, by_layer=True)
        device.fail(CALLS[path], code=719)
        happened.set()
        until_issued(transfer)
        assert not transfer.done()
        for ask in (lambda: transfer.wait(user), lambda: transfer.wait_layer(1, user)):
            with pytest.raises(kvplan.TransferError, match=rf"{CALLS[path]} returned CUDA_ERROR_SIMULATED \(719\)"):
                ask()
        gate.set()
        device.run()
        assert transfer.done()


@every_path
@both_ways
@pytest.mark.parametrize("seed", range(3))
def test_an_event_counts_as_it_was_recorded_at_the_submit_however_late_the_issue(path, direction, seed):
    device = Device(seed, eager=False)
    pair = pair_on(device, direction)
    with executor_on(device, path) as executor:
        happened, producer, other = threading.Event(), device.stream(), device.stream()
        executor.submit(pair.plan(Move([5], [5])), after=happened)  # what comes now is issued behind it
        gate = device.gate(producer)
        renewal(device, producer, pair, seed + 1)
        event = Event.on(device, producer)
        transfer = executor.submit(pair.plan(MOVE), after=event)
        device.record(event.cuda_event, other)
        happened.set()
        until_issued(transfer)
        device.run()
        assert not transfer.done()
        gate.set()
        device.run()
        assert transfer.done()
        pair.check()


@every_path
@pytest.mark.parametrize("late", [False, True])
def test_after_takes_what_has_only_the_protocol_of_streams(path, late):
    device, happened = Device(4, eager=False), threading.Event()
    pair = pair_on(device, "load")
    with executor_on(device, path) as executor:
        if late:
            executor.submit(pair.plan(Move([5], [5])), after=happened)
        user = device.stream()
        gate = device.gate(user)
        renewal(device, user, pair, 5)
        transfer = executor.submit(pair.plan(MOVE), after=Protocol(user))
        happened.set()
        if late:
            until_issued(transfer)
        device.run()
        assert not transfer.done()
        gate.set()
        device.run()
        assert transfer.done()
        pair.check()


# Captures, layers, tables.


def test_whether_a_transfer_is_done_is_said_while_another_thread_compiles():
    device, answered = Device(1), []
    pair, back = pair_on(device, "load"), pair_on(device, "store")
    with executor_on(device, "kernel") as executor:
        transfer, load = executor.submit(pair.plan(MOVE)), device.load

        def loads(*arguments):
            asks = threading.Thread(target=transfer.done)
            asks.start()
            asks.join(PATIENCE)
            answered.append(not asks.is_alive())
            return load(*arguments)

        with mock.patch.object(device, "load", loads):
            executor.submit(back.plan(MOVE)).synchronize()
        assert answered == [True]


def test_an_after_may_close_the_executor():
    device = Device(1)
    pair = pair_on(device, "load")

    class Closes:
        def synchronize(self) -> None:
            executor.close()

    with executor_on(device, "copy_engine") as executor:
        transfer = executor.submit(pair.plan(MOVE), after=Closes())
        transfer.synchronize(timeout=PATIENCE)
        with pytest.raises(kvplan.TransferError, match="closed"):
            executor.submit(pair.program.plan([1], [2]))
        pair.check()
