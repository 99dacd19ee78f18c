"""Lists of driver calls of which one fails: every wait says so, and transfers behind them keep their order."""

from __future__ import annotations

import threading
from contextlib import suppress

import pytest

import kvplan
from kvplan.execute.gpu.resources import Limits
from tests.paged_caches import Move
from tests.patience import PATIENCE, until
from tests.simulated import Device, Stream
from tests.simulated.executors import (
    MOVE,
    PATHS,
    both_ways,
    every_path,
    executor_on,
    open_executor,
    pair_on,
    paths_in_turn,
)
from tests.simulated.held_lists import BLOCKED, CALLS, LONG, Held, device_of


@both_ways
@every_path
def test_an_error_of_a_list_is_raised_by_every_wait(path, direction):
    for ask in (
        lambda transfer, user: transfer.wait(user),
        lambda transfer, user: transfer.wait_layer(1, user),
        lambda transfer, user: transfer.await_issue(),
        lambda transfer, user: transfer.synchronize(PATIENCE),
        lambda transfer, user: transfer.result(),
    ):
        device = Device(3)
        pair = pair_on(device, direction)
        with executor_on(device, path, limits=Limits(**LONG, batch_nbytes=0)) as executor:
            user = Stream(device.stream())
            executor.submit(pair.plan(Move([0], [1]))).synchronize()
            device.fail(CALLS[path], code=719)
            transfer = executor.submit(pair.program.plan(MOVE.src, MOVE.dst))
            with pytest.raises(kvplan.TransferError, match=rf"{CALLS[path]} returned CUDA_ERROR_SIMULATED \(719\)"):
                ask(transfer, user)
            until(transfer.done)
            executor.submit(pair.plan(MOVE)).synchronize()
            assert repr(transfer).endswith("failed)")
            assert executor.stats().in_flight == 0


@both_ways
@pytest.mark.parametrize("path", ["copy_engine", "staged", "kernel"])
@pytest.mark.parametrize("seed", range(8))
def test_a_transfer_behind_a_failed_list_overwrites_what_that_one_still_moves(path, direction, seed):
    """It was submitted before the failure was known. The failed list lacks the calls that join its streams."""
    device = Device(seed, eager=False)
    pair = pair_on(device, direction)
    sizes = LONG | {"batch_nbytes": 0, "batch_copies": 1, "launch_rows": 2, "chunk_nbytes": 256,
                    "small_chunk_nbytes": 1, "small_chunks": 4}  # fmt: skip
    with executor_on(device, path, streams=4 if path == "copy_engine" else None, limits=Limits(**sizes)) as executor:
        executor.submit(pair.plan(Move([0], [1]))).synchronize()
        gate = device.gate(user := device.stream())
        device.fail(CALLS[path], spare=3, code=719)
        broken = executor.submit(pair.program.plan(MOVE.src, MOVE.dst), after=Stream(user))
        last = executor.submit(pair.plan(Move(MOVE.src[::-1], MOVE.dst)))
        with suppress(kvplan.TransferError):
            broken.await_issue()
        gate.set()
        last.await_issue()
        device.run()
        last.synchronize()
        assert broken.done()
        pair.check()


@pytest.mark.parametrize("failing", [True, False])
@pytest.mark.parametrize("path", PATHS)
def test_a_transfer_fails_if_the_list_fails_of_the_transfer_that_it_names(path, failing):
    device = device_of()
    store = pair_on(device, "store")
    with executor_on(device, path, limits=Limits(**BLOCKED)) as executor:
        held = Held(device, executor, store)
        back = kvplan.compile(*reversed(store.layouts)).plan(MOVE.dst, [0, 2, 6, 7])
        second = executor.submit(back, after=held.transfer)
        third = executor.submit(store.program.plan([8], [8]), after=held.transfer)
        if failing:
            device.fail("cuEventRecord", code=719)  # the next one, by which the list waits for the GPU
        held.open()
        if not failing:
            second.synchronize()
            third.synchronize()
            return
        for transfer, said in (
            (held.transfer, "cuEventRecord"),
            (second, "given as after= failed"),
            (third, "given as after="),
        ):
            with pytest.raises(kvplan.TransferError, match=said):
                transfer.synchronize(PATIENCE)
        until(second.done)
        device.run()
        assert executor.stats().in_flight == 0
        executor.submit(store.plan(MOVE)).synchronize()


@both_ways
@pytest.mark.parametrize("seed", range(4))
def test_a_transfer_that_fails_before_its_calls_stands_behind_lists_that_are_not_played(direction, seed):
    device = Device(seed, eager=False)
    pair = pair_on(device, direction)
    names = ["copy_engine", "kernel", "kernel"]
    with executor_on(device, limits=Limits(**BLOCKED)) as executor, paths_in_turn(names):
        held = Held(device, executor, pair)
        device.fail("cuModuleLoadData")
        with pytest.raises(kvplan.TransferError, match="LoadData"):
            executor.submit(pair.program.plan([2], [6]))
        last = executor.submit(pair.plan(Move(MOVE.src[::-1], MOVE.dst)))  # over what the first one moves
        device.run()
        assert not last.done()
        held.open()
        last.synchronize()
        pair.check()


def test_a_lost_context_leaves_no_transfer_in_flight():
    device = Device(3, eager=False)
    pair = pair_on(device, "load")
    with paths_in_turn(["copy_engine"] * 9 + ["copy_engine_2d"]):
        executor = open_executor(device)
        for one in [executor.submit(pair.program.plan(MOVE.src, MOVE.dst)) for _ in range(8)]:
            one.synchronize()  # their events are left for the next transfers
        first = executor.submit(pair.program.plan(MOVE.src, MOVE.dst))
        device.lost = True
        with pytest.raises(kvplan.TransferError):
            executor.submit(pair.program.plan(MOVE.src, MOVE.dst))
        with pytest.raises(kvplan.TransferError):
            first.synchronize()
        closing = threading.Thread(target=executor.close, daemon=True)
        closing.start()
        closing.join(PATIENCE)
        assert not closing.is_alive()  # the transfer that failed held the events of the first one


def test_no_thread_can_be_started_for_a_long_list(monkeypatch):
    device = Device(3)
    pair = pair_on(device, "load")
    with executor_on(device, "copy_engine", limits=Limits(**LONG)) as executor:
        start = threading.Thread.start

        def refuse(thread: threading.Thread) -> None:
            if thread.name.startswith("kvplan-issue"):
                raise RuntimeError("can't start new thread")
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(kvplan.TransferError, match="no thread makes the calls of long transfers: can't start"):
            executor.submit(pair.program.plan(MOVE.src, MOVE.dst))
        monkeypatch.undo()
        until(lambda: not executor.stats().in_flight)
        executor.submit(pair.plan(MOVE)).synchronize()
        pair.check()
