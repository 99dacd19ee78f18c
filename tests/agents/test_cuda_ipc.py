"""The transport of GPU memory, on simulated GPUs: the order of transfers, notes and the owner's work."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import kvplan
from kvplan import LayoutError, PathError
from kvplan.agents.cuda_ipc import cuda_ipc_owner
from kvplan.agents.cuda_ipc.cuda_ipc_way import CudaIpcWay
from kvplan.agents.relocation import regions_of
from kvplan.verification.raw_bytes import Contents
from tests.agents.simulated_ipc import (
    ORIGIN,
    assert_nothing_is_left,
    cache,
    devices_that_are_left_alone,
    driven,
    expandable,
    gpus,
    joined,
)
from tests.simulated import Event, Stream
from tests.simulated.executors import executor_on

devices = pytest.fixture(devices_that_are_left_alone)


@pytest.mark.parametrize("path", ["kernel", "copy_engine", "copy_engine_2d"])
@pytest.mark.parametrize("owner", [0, 1])
def test_blocks_are_pulled_and_pushed(devices, path, owner):
    theirs, there = cache(devices, owner, 1)
    mine, here = cache(devices, 0, 2)
    before = theirs.copy()
    with executor_on(devices[0], path) as executor, joined(there, "cuda:0") as ends:
        assert [one.device for one in ends.opened.mapped] == [f"cuda:{owner}"] * 2
        assert ends.layout.device == f"cuda:{owner}"
        pull = executor.submit(kvplan.compile(ends.layout, here).plan([1, 5], [0, 7]))
        pull.synchronize()
        push = executor.submit(kvplan.compile(here, ends.layout).plan([7, 0], [2, 3]))
        push.synchronize()
    np.testing.assert_array_equal(mine[:, [0, 7]], before[:, [1, 5]])
    np.testing.assert_array_equal(theirs[:, [2, 3]], before[:, [5, 1]])


@pytest.mark.parametrize("owner", [0, 1])
def test_memory_of_pieces_is_mapped_at_other_addresses(devices, owner):
    mine, here = cache(devices, 0, 2)
    with expandable(devices, owner, 1) as (theirs, there):
        before = theirs.copy()
        with executor_on(devices[0], "kernel") as executor, joined(there, "cuda:0") as ends:
            (one,) = ends.opened.mapped
            assert (one.nbytes, one.here != one.theirs) == (8192 + 4096, True)
            assert ends.offer.part["memory"][0]["pieces"] == [[8192, 1], [4096, 1]]
            load, store = kvplan.compile(ends.layout, here), kvplan.compile(here, ends.layout)
            executor.submit(load.plan([1, 5], [0, 7])).synchronize()
            executor.submit(store.plan([7, 0], [2, 3])).synchronize()
            np.testing.assert_array_equal(mine[:, [0, 7]], before[:, [1, 5]])
            np.testing.assert_array_equal(theirs[:, [2, 3]], before[:, [5, 1]])


def test_what_was_met_is_read_and_written_by_address(devices):
    """So do the markers of kvplan.verify."""
    with expandable(devices, 0, 1) as (theirs, there), joined(there) as ends:
        contents = Contents(ends.layout)
        start = min(region.address for region in ends.layout.regions)
        flat = theirs.reshape(-1)
        addresses = start + np.array([[5, 900, 901], [1400, 6, 4]])
        np.testing.assert_array_equal(contents.read(addresses), flat[addresses - start])
        contents.write(addresses, np.array([[1, 2, 3], [4, 5, 6]], np.uint8))
        np.testing.assert_array_equal(flat[[4, 5, 6, 900, 901, 1400]], [6, 1, 5, 2, 3, 4])
        np.testing.assert_array_equal(contents.stretch(start + 3, 8), flat[3:11])
        contents.write_stretch(start + 3, np.arange(8, dtype=np.uint8))
        np.testing.assert_array_equal(flat[3:11], range(8))
        assert contents.read(np.empty((0, 2), np.int64)).shape == (0, 2)
    with pytest.raises(LayoutError, match="is no longer mapped"):
        Contents(ends.layout)


def test_a_piece_that_is_smaller_than_its_card_says_is_refused(devices):
    with expandable(devices, 0) as (_, there):
        regions = regions_of([there])
        offer = CudaIpcWay().offer(regions)
        part = {"memory": [offer.part["memory"][0] | {"nbytes": 16384, "pieces": [[8192, 2]]}]}
        checked = CudaIpcWay().check(part, regions, ORIGIN)
        served = offer.serve({}, lambda message: None)
        with pytest.raises(LayoutError, match="has fewer than the 8192 bytes that its card promises"):
            CudaIpcWay().open(checked, served.table, served.descriptors, lambda message: None, ORIGIN)
        served.close()
        offer.close()


def test_too_many_pieces_for_the_descriptors_of_a_process(devices, monkeypatch):
    monkeypatch.setattr(cuda_ipc_owner.resource, "getrlimit", lambda which: (cuda_ipc_owner.SPARE_DESCRIPTORS + 1, 0))
    with (
        expandable(devices, 0) as (_, there),
        pytest.raises(PathError, match=r"2 pieces.*ulimit -n"),
    ):
        CudaIpcWay().offer(regions_of([there]))


def test_a_note_comes_after_the_last_byte_without_the_sender(devices):
    device = devices[0]
    theirs, there = cache(devices, 1, 1)
    mine, here = cache(devices, 0, 2)
    with executor_on(device, "kernel") as executor, joined(there, "cuda:0") as ends:
        user = device.stream()
        device.eager = False
        gate = device.gate(user)
        program = kvplan.compile(here, ends.layout)
        first = executor.submit(program.plan([0], [1]), after=Stream(user))
        delivers = [ends.opened.after(first, b"one", urgent=False)]
        second = executor.submit(program.plan([2], [3]))
        delivers.append(ends.opened.after(second, b"two", urgent=False))
        third = executor.submit(program.plan([2], [4]))
        assert ends.opened.after(third, b"", urgent=False) is None  # no note
        device.run()
        assert ends.notes() == []
        gate.set()
        device.run()
        np.testing.assert_array_equal(theirs[:, [1, 3]], mine[:, [0, 2]])
        assert ends.notes() == [b"one", b"two"]
        for deliver in delivers:  # the agent's settling thread, later
            deliver(None)
        assert ends.told == []
        assert ends.notes() == []
        for each in (first, second, third):
            each.synchronize()


def test_notes_of_high_priority_do_not_wait_for_others(devices):
    device = devices[0]
    _, there = cache(devices, 0, 1)
    _, here = cache(devices, 0, 2)
    with executor_on(device, "kernel") as executor, joined(there) as ends:
        user = device.stream()
        device.eager = False
        gate = device.gate(user)
        program = kvplan.compile(here, ends.layout)
        slow = executor.submit(program.plan([0], [1]), after=Stream(user))
        ends.opened.after(slow, b"slow", urgent=False)
        urgent = executor.submit(program.plan([2], [3]), priority="high")
        ends.opened.after(urgent, b"urgent", urgent=True)
        device.run()
        assert ends.notes() == [b"urgent"]
        gate.set()
        device.run()
        assert ends.notes() == [b"slow"]
        slow.synchronize()
        urgent.synchronize()


@pytest.mark.parametrize("moved", [True, False])
def test_the_note_of_a_transfer_that_waits_on_the_cpu_comes_by_a_message_and_in_its_place(devices, moved):
    _, there = cache(devices, 0, 1)
    _, here = cache(devices, 0, 2)
    with executor_on(devices[0], "kernel") as executor, joined(there) as ends:
        program, event = kvplan.compile(here, ends.layout), threading.Event()
        first = executor.submit(program.plan([0], [1]), after=event)
        assert first.queued
        deliver = ends.opened.after(first, b"one" * 20_000, urgent=False)
        event.set()
        first.synchronize()
        second = executor.submit(program.plan([2], [3]))
        ends.opened.after(second, b"two", urgent=False)
        second.synchronize()
        devices[0].run()
        assert ends.notes() == []
        deliver(None if moved else kvplan.TransferError())
        assert ends.notes() == [b"one" * 20_000, b"two"][not moved :]


def test_a_note_whose_word_is_not_written_comes_by_a_message(devices):
    _, there = cache(devices, 0, 1)
    _, here = cache(devices, 0, 2)
    with executor_on(devices[0], "kernel") as executor, joined(there) as ends:
        program = kvplan.compile(here, ends.layout)
        first = executor.submit(program.plan([0], [1]))
        devices[0].fail("cuStreamWriteValue64")
        deliver = ends.opened.after(first, b"one", urgent=False)
        second = executor.submit(program.plan([0], [1]))
        ends.opened.after(second, b"two", urgent=False)
        for each in (first, second):
            each.synchronize()
        devices[0].run()
        assert ends.notes() == []
        deliver(None)
        assert ends.notes() == [b"one", b"two"]


@pytest.mark.parametrize("seed", range(10))
def test_a_transfer_waits_for_what_the_owner_published(seed):
    """Streams advance in random order, so that a missing wait shows as wrong bytes."""
    devices = gpus(seed=seed)
    with driven(devices):
        theirs, there = cache(devices, 1, 1)
        mine, here = cache(devices, 0, 2)
        with executor_on(devices[0], "kernel") as executor, joined(there, "cuda:0") as ends:
            compute, user = devices[1].stream(), devices[0].stream()
            program = kvplan.compile(ends.layout, here)
            new = np.random.default_rng(seed + 9).integers(0, 256, theirs.shape, np.uint8)
            devices[1].put(compute, lambda: theirs.__setitem__(slice(None), new))
            ends.offer.publish(OnGpu(compute, 1))
            mark = np.zeros(1)
            devices[0].put(user, lambda: mark.__setitem__(0, 1))
            event = Event.on(devices[0], user)
            for after in (None, Stream(user), event, executor.submit(program.plan([0], [0]))):
                given = ends.opened.before(None, after)
                executor.submit(program.plan([1, 5], [0, 7]), after=given).synchronize()
                np.testing.assert_array_equal(mine[:, [0, 7]], new[:, [1, 5]])
            assert ends.opened.before(None, None) is None  # all that was published has passed
            devices[0].run()
        for device, stream in zip(devices[::-1], (compute, user), strict=True):
            device.destroy_stream(stream)
        devices[0].destroy_event(event.cuda_event)
        assert_nothing_is_left(devices)


class OnGpu:
    """A stream of torch."""

    def __init__(self, handle: int, ordinal: int) -> None:
        self.cuda_stream, self.device_index = handle, ordinal


def test_what_the_owner_published_is_waited_for_on_the_cpu_where_the_caller_s_object_is(devices):
    theirs, there = cache(devices, 1, 1)
    with joined(there, "cuda:0") as ends:
        compute, event = devices[1].stream(), threading.Event()
        devices[1].put(compute, lambda: theirs.fill(3))
        ends.offer.publish(OnGpu(compute, 1))
        devices[0].eager = False
        assert ends.opened.before(None, event) is event
        assert theirs.min() == theirs.max() == 3


@pytest.mark.parametrize("seed", range(10))
def test_the_owner_s_stream_waits_for_the_visitor_s_transfers(seed):
    devices = gpus(seed=seed)
    with driven(devices):
        theirs, there = cache(devices, 1, 1)
        before = theirs.copy()
        mine, here = cache(devices, 0, 2)
        with executor_on(devices[0], "kernel") as executor, joined(there, "cuda:0") as ends:
            compute = devices[1].stream()
            ends.offer.wait_for_visitors(OnGpu(compute, 1))  # no visitor has sent its event
            ends.hear()
            pull = executor.submit(kvplan.compile(ends.layout, here).plan([1, 5], [0, 7]))
            ends.opened.after(pull, b"", urgent=False)
            ends.offer.wait_for_visitors(OnGpu(compute, 1))
            devices[1].put(compute, lambda: theirs.fill(0))  # the owner's next blocks
            devices[0].run()
            pull.synchronize()
            np.testing.assert_array_equal(mine[:, [0, 7]], before[:, [1, 5]])
            assert not theirs.any()
        assert_nothing_is_left(devices)


def test_streams_of_other_gpus_are_refused(devices):
    _, there = cache(devices, 1)
    with joined(there) as ends:
        for call in (ends.offer.publish, ends.offer.wait_for_visitors):
            with pytest.raises(kvplan.KVPlanError, match="stream is a str"):
                call("stream")
            with pytest.raises(kvplan.KVPlanError, match="the stream is of cuda:0; give one of cuda:1"):
                call(OnGpu(7, 0))
