"""Submits that never wait for the GPU, and calls that never fill the driver's queue, on a simulated device."""

from __future__ import annotations

import threading

import pytest

import kvplan
from kvplan.execute.gpu.resources import Limits
from tests.paged_caches import DEVICE_NOTATION, Paged
from tests.patience import PATIENCE
from tests.simulated import Device, Stream
from tests.simulated.executors import MOVE, POOL, OnDevice, both_ways, executor_on, is_apart, pair_on

CALLS = ("cuMemcpyAsync", "cuMemcpyBatchAsync", "cuMemcpy2DAsync", "cuLaunchKernelEx")
LATE = {"inline_effort": 0, "lane_calls": -1}
SMALL_CHUNKS = {"chunk_nbytes": 256, "small_chunk_nbytes": 1, "small_chunks": 100}


def calls_of(gpu: Device) -> int:
    return sum(gpu.calls.count(call) for call in CALLS)


@both_ways
@pytest.mark.parametrize("path", ["copy_engine", "staged"])
def test_without_batches_many_copies_are_made_by_the_issuer(path, direction):
    gpu = Device(3, eager=False)
    gpu.opener = threading.current_thread()
    gpu.driver.cuMemcpyBatchAsync = None
    pair = pair_on(gpu, direction)
    with executor_on(gpu, path, limits=Limits(calls_in_flight=1, inline_effort=3)) as executor:
        user = gpu.stream()
        gate = gpu.gate(user)
        transfer = executor.submit(pair.plan(MOVE), after=Stream(user))
        assert is_apart(executor)
        gate.set()
        transfer.synchronize()
        pair.check()


LOOPS = OnDevice("block layer kv token head dim", layer=5, token=3, head=2, dim=96, padded=True)
INTO = Paged("layer token kv block head dim", layer=5, token=3, head=2, dim=96, padded=True)


@both_ways
@pytest.mark.parametrize("far", ["none", "some", "all"])
@pytest.mark.parametrize("by_layer", [False, True])
def test_two_dimensional_copies_are_counted_as_they_are_issued(direction, far, by_layer):
    """One a unit, run, and step of its loops but the longest, in each group of layers; the rest are flat."""
    gpu = Device(3)
    pair = pair_on(gpu, direction, LOOPS, INTO)
    plan = pair.plan(MOVE)
    pitches = sorted({max(loop[1:]) for part in plan.parts for run in part.group.runs for loop in run.loops})
    gpu.max_pitch = {"none": pitches[-1], "some": pitches[-1] - 1, "all": 1}[far]
    with executor_on(gpu, "copy_engine_2d", limits=Limits(layer_group_nbytes=1)) as executor:
        executor.submit(plan, by_layer=by_layer).synchronize()
        issued = gpu.calls.count("cuMemcpy2DAsync")
        assert bool(issued) == (far == "none" or (by_layer and far == "some"))
    for effort in (10_000, 2):
        limits = Limits(layer_group_nbytes=1, inline_effort=effort)
        with executor_on(gpu, "copy_engine_2d", limits=limits) as executor:
            assert executor.submit(plan, by_layer=by_layer).result().launches >= issued
            assert is_apart(executor) == (effort == 2)
    pair.check()


def test_many_small_loads_beside_a_large_one_are_made_by_the_issuer():
    gpu = Device(3, eager=False)
    small = pair_on(gpu, "load")
    large = pair_on(gpu, "load", OnDevice(DEVICE_NOTATION, dim=9600), Paged(POOL.notation, dim=9600))
    with executor_on(gpu, "copy_engine", limits=Limits(batch_nbytes=1000, inline_effort=24)) as executor:
        plans = [pair.plan(MOVE) for pair in (small, large)]
        executor.submit(plans[1]).synchronize()
        assert not is_apart(executor)
        executor.submit(kvplan.join(plans)).synchronize()
        assert is_apart(executor)
        executor.submit(plans[1]).synchronize()
        for pair in (small, large):
            pair.check()


def test_rows_that_go_one_by_one_do_not_make_a_submit_wait():
    gpu = Device(3, eager=False)
    gpu.opener = threading.current_thread()
    pair = pair_on(gpu, "load")
    with executor_on(gpu, "copy_engine_2d", limits=Limits(calls_in_flight=1)) as executor:
        user = gpu.stream()
        gate = gpu.gate(user)
        gpu.faults["cuMemcpy2DAsync"] = [1] * 100  # an invalid value: rows of several allocations
        transfer = executor.submit(pair.plan(MOVE), after=Stream(user))
        assert not is_apart(executor)
        gate.set()
        transfer.synchronize()
        pair.check()


@both_ways
@pytest.mark.parametrize(("path", "inlined", "by_layer"), [
    ("copy_engine", 1 << 20, True), ("staged", 1 << 20, False), ("staged", 0, False), ("staged", 0, True),
])  # fmt: skip
def test_the_calls_of_a_transfer_wait_for_its_own_however_it_is_cut(path, inlined, by_layer, direction):
    gpu = Device(3, eager=False)
    gpu.driver.cuMemcpyBatchAsync = None if inlined else True
    pair = pair_on(gpu, direction)
    sizes = LATE | SMALL_CHUNKS | {"calls_in_flight": 4, "batch_nbytes": inlined, "layer_group_nbytes": 1}
    with executor_on(gpu, path, limits=Limits(**sizes)) as executor:
        user = gpu.stream()
        gate = gpu.gate(user)
        transfer = executor.submit(pair.plan(MOVE), after=Stream(user), by_layer=by_layer)
        assert gpu.blocked.wait(PATIENCE)
        assert transfer.unplayed
        issued = calls_of(gpu)
        gate.set()
        transfer.synchronize()
        assert 0 < issued <= 8 < calls_of(gpu)
        pair.check()


@both_ways
@pytest.mark.parametrize(("inlined", "old"), [(1 << 20, False), (0, True), (0, False)])
def test_a_staged_transfer_counts_the_copies_that_go_by_a_call_each(direction, inlined, old):
    gpu = Device(3)
    if old:
        gpu.driver.cuMemcpyBatchAsync = None
    pair = pair_on(gpu, direction, pool=Paged("layer kv block token head dim", dim=96, padded=True))
    with executor_on(gpu, "staged", limits=Limits(batch_nbytes=inlined)) as executor:
        executor.submit(pair.plan(MOVE)).synchronize()  # its tables are uploaded
        before = calls_of(gpu)
        transfer = executor.submit(pair.plan(MOVE))
        units = 1 if direction == "load" else 0  # which a load brings along
        assert transfer.result().launches == calls_of(gpu) - before - units
        pair.check()


@both_ways
def test_an_error_that_names_no_descriptor_is_not_its_own_cause(direction):
    gpu = Device(3)
    pair = pair_on(gpu, direction)
    with executor_on(gpu, "staged") as executor:
        executor.submit(pair.plan(MOVE)).synchronize()
        gpu.fail("cuStreamWaitEvent", code=719)
        with pytest.raises(kvplan.TransferError, match="cuStreamWaitEvent") as caught:
            executor.submit(pair.program.plan(MOVE.src, MOVE.dst))
        assert caught.value.__cause__ is None
