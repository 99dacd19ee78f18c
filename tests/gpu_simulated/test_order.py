"""What comes after what, on a simulated GPU whose streams go on in any order."""

from __future__ import annotations

import threading
from unittest import mock

import numpy as np
import pytest

import kvplan
from kvplan.execute.gpu.lanes.lane import Lane
from kvplan.execute.gpu.resources import Limits
from tests.paged_caches import Move, Pair
from tests.patience import PATIENCE, until
from tests.simulated import Device, Event, Stream
from tests.simulated.executors import (
    LARGE_BLOCKS,
    MOVE,
    PATHS,
    SMALL,
    TIGHT,
    both_ways,
    every_path,
    executor_on,
    pair_on,
    until_issued,
)
from tests.simulated.overwrites import TINY_RING, overwrites, renewal

SEEDS = range(12)


@both_ways
@pytest.mark.parametrize("seed", SEEDS)
def test_what_was_submitted_last_is_what_stays_whatever_the_paths(direction, seed):
    device = Device(seed, eager=False)
    names = [str(name) for name in np.random.default_rng(seed).choice(PATHS, 12)]
    with executor_on(device, limits=Limits(**TINY_RING)) as executor:
        overwrites(device, executor, pair_on(device, direction), names, seed)


@both_ways
@every_path
@pytest.mark.parametrize("seed", range(4))
def test_what_was_submitted_last_is_what_stays_on_one_path(direction, path, seed):
    device = Device(seed, eager=False)
    with executor_on(device, limits=Limits(**TINY_RING)) as executor:
        overwrites(device, executor, pair_on(device, direction), [path] * 8, seed)


@every_path
@both_ways
@pytest.mark.parametrize("kind", ["stream", "protocol", "event"])
def test_a_transfer_comes_after_the_pending_work_of_a_stream(path, direction, kind):
    for seed in SEEDS:
        device = Device(seed, eager=False)
        pair = pair_on(device, direction)
        with executor_on(device, path, limits=Limits(**TINY_RING)) as executor:
            user = device.stream()
            gate = device.gate(user)
            renewal(device, user, pair, seed + 1)
            after = Stream(user)
            if kind == "protocol":
                after = Protocol(user)
            elif kind == "event":
                after = Event.on(device, user)
            transfer = executor.submit(pair.plan(MOVE), after=after)
            device.run()
            assert not transfer.done()
            gate.set()
            device.run()
            assert transfer.done()
            pair.check()


class Protocol:
    """A stream that speaks the protocol of cuda.core."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._handle

    def synchronize(self) -> None:
        raise AssertionError("kvplan blocked the CPU on a stream")


class Foreign(Stream):
    """A stream of another GPU: only that one can record on it."""

    device_index = 1

    def record_event(self) -> Event:
        return Event.on(self.device, self.cuda_stream)


def test_a_stream_of_another_gpu_records_by_itself():
    device = Device(2, eager=False)
    pair = pair_on(device, "load")
    with executor_on(device, "kernel") as executor:
        user = Foreign(device.stream())
        user.device = device
        gate = device.gate(user.cuda_stream)
        renewal(device, user.cuda_stream, pair, 5)
        executor.submit(pair.plan(MOVE), after=user)
        gate.set()
        device.run()
        pair.check()


def test_an_event_never_recorded_has_passed():
    device = Device()
    pair = pair_on(device, "load")
    with executor_on(device, "kernel") as executor:
        executor.submit(pair.plan(MOVE), after=Event(0)).synchronize()
        pair.check()


@every_path
@pytest.mark.parametrize("seed", range(6))
def test_a_load_comes_after_the_store_that_it_names(path, seed):
    device = Device(seed, eager=False)
    store = pair_on(device, "store")
    with executor_on(device, path, limits=Limits(**TINY_RING)) as executor:
        user = device.stream()
        gate = device.gate(user)
        first = executor.submit(store.plan(MOVE), after=Stream(user))
        back = kvplan.compile(*reversed(store.layouts)).plan(MOVE.dst, [0, 2, 6, 7])
        for layer in range(2):
            here = store.src.of_layer(store.src_bytes, layer)
            here[:, [0, 2, 6, 7]] = here[:, list(MOVE.src)]
        second = executor.submit(back, after=first)
        device.run()
        assert not second.done()
        gate.set()
        device.run()
        assert first.done()
        assert second.done()
        store.check()


@every_path
@both_ways
def test_a_transfer_comes_after_what_only_the_cpu_can_wait_for_and_holds_up_those_behind_it(path, direction):
    device, happened = Device(3), threading.Event()
    pair, free = pair_on(device, direction), pair_on(device, "store" if direction == "load" else "load", seed=1)
    with executor_on(device, path, limits=Limits(**TINY_RING)) as executor:
        first = executor.submit(pair.plan(MOVE), after=happened)
        second = executor.submit(pair.plan(Move([7, 6], [0, 7])))
        third = executor.submit(pair.plan(Move([2], [7])), after=second)
        executor.submit(free.plan(MOVE)).synchronize()  # the other direction goes on
        free.check()
        assert not first.done()
        assert not second.done()
        with pytest.raises(kvplan.TransferError, match=r"within 0\.01 seconds"):
            second.synchronize(timeout=0.01)
        happened.set()
        third.synchronize(timeout=PATIENCE)
        assert first.done()
        assert second.done()
        assert repr(third).endswith("done)")
        pair.check()


def test_a_timeout_of_what_is_in_flight_says_so_and_it_goes_on():
    device = Device()
    pair = pair_on(device, "load")
    with executor_on(device, "kernel") as executor:
        user = device.stream()
        gate = device.gate(user)
        transfer = executor.submit(pair.plan(MOVE), after=Stream(user))
        with pytest.raises(kvplan.TransferError, match=r"within 0\.01 seconds"):
            transfer.synchronize(timeout=0.01)
        assert repr(transfer).endswith("in flight)")
        gate.set()
        transfer.synchronize(timeout=PATIENCE)
        pair.check()


@every_path
@both_ways
def test_calls_that_the_driver_s_queue_may_not_hold_are_made_by_the_issuer(path, direction):
    device = Device(3, eager=False)
    pair, later = pair_on(device, direction), []

    def give(lane, transfer, *arguments):
        later.append(transfer)
        queue_up(lane, transfer, *arguments)

    queue_up = Lane._give
    with (
        executor_on(device, path, limits=Limits(lane_calls=20)) as executor,
        mock.patch.object(Lane, "_give", give),
    ):  # fmt: skip
        lane, user = executor._backend.lanes[direction], device.stream()
        gate = device.gate(user)
        calls = [executor.submit(pair.plan(MOVE), after=Stream(user))]
        while not later:
            assert lane.calls == sum(transfer.launches for transfer in calls)
            calls.append(executor.submit(pair.plan(MOVE)))
        assert sum(transfer.launches for transfer in calls[:-2]) <= 20
        assert sum(transfer.launches for transfer in calls[:-1]) > 20
        assert later[0].unplayed
        gate.set()
        until_issued(later[0])
        until(lambda: lane.issuer.idle)
        device.run()
        executor.submit(
            pair.plan(MOVE)
        ).synchronize()  # what has ended is in nobody's way, though nobody has looked yet
        assert len(later) == 1
        pair.check()


@pytest.mark.parametrize(("path", "call"), [("copy_engine", "cuMemcpyAsync"), ("copy_engine_2d", "cuMemcpy2DAsync")])
def test_a_transfer_of_many_calls_waits_for_its_own_where_the_driver_s_queue_would_be_full(path, call):
    device = Device(3, eager=False)
    pair = pair_on(device, "load")
    with executor_on(device, path, limits=Limits(calls_in_flight=2, inline_effort=0)) as executor:
        user = device.stream()
        gate = device.gate(user)
        plan = pair.plan(MOVE)
        transfer = executor.submit(plan, after=Stream(user))
        assert device.blocked.wait(PATIENCE)
        assert transfer.unplayed
        assert 0 < device.calls.count(call) <= 4
        gate.set()
        transfer.synchronize()
        assert transfer.result().launches > 4
        pair.check()


@every_path
@both_ways
def test_layers_are_there_when_a_stream_has_waited_for_them_and_not_all_at_once(path, direction):
    early = [first_layer_was_early(Device(seed, eager=False), path, direction) for seed in SEEDS]
    assert any(early), "the first layer was never there before the last"


def first_layer_was_early(device: Device, path: str, direction: str) -> bool:
    pair = pair_on(device, direction, SMALL, LARGE_BLOCKS)
    seen: list[tuple[int, bool]] = []
    with executor_on(device, path, limits=Limits(**TIGHT, chunk_nbytes=256)) as executor:
        readers = [device.stream(), device.stream()]
        move = Move([3, 1, 8, 5], [2, 4], dst_skip=2) if direction == "store" else Move([2, 4], [3, 1, 8, 5], 2)
        transfer = executor.submit(pair.plan(move), by_layer=True)
        for layer, reader in enumerate(readers):
            transfer.wait_layer(layer, Stream(reader))
            device.put(reader, lambda layer=layer: seen.append((layer, transfer_passed(device, transfer))))
            device.put(reader, lambda layer=layer: check_layer(pair, layer))
        with pytest.raises(kvplan.LayoutError, match="layer 2 is not moved"):
            transfer.wait_layer(2, Stream(readers[0]))
        device.run()
        assert len(seen) == 2
        pair.check()
    return (0, False) in seen


def transfer_passed(device: Device, transfer: kvplan.Transfer) -> bool:
    return transfer._over or device.passed[transfer._end] >= device.recorded[transfer._end] > 0


def check_layer(pair: Pair, layer: int) -> None:
    got, want = pair.dst.of_layer(pair.dst_roots, layer), pair.dst.of_layer(pair.dst_bytes, layer)
    assert (got == want).all(), f"layer {layer} was not there yet"


@every_path
@pytest.mark.parametrize("seed", range(4))
def test_a_stream_that_waited_reads_what_was_loaded(path, seed):
    device = Device(seed, eager=False)
    pair = pair_on(device, "load")
    with executor_on(device, path, limits=Limits(**TINY_RING)) as executor:
        reader = device.stream()
        transfer = executor.submit(pair.plan(MOVE))
        transfer.wait(Protocol(reader))
        for layer in range(2):
            device.put(reader, lambda layer=layer: check_layer(pair, layer))
        with pytest.raises(kvplan.KVPlanError, match="stream is a int"):
            transfer.wait(7)
        with pytest.raises(kvplan.KVPlanError, match="stream is a NoneType"):
            transfer.wait()  # no torch stream is current
        device.run()
        transfer.result()
        transfer.wait(Protocol(reader))  # it is over: nothing to wait for
