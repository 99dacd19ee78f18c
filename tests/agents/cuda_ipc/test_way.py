"""The transport of GPU memory, on simulated GPUs: the order of transfers, notes and the owner's work."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import kvplan
from kvplan import LayoutError, PathError
from kvplan.agents.cuda_ipc import cuda_ipc_owner
from kvplan.agents.cuda_ipc.cuda_ipc_messages import NOTE, note_messages
from kvplan.agents.cuda_ipc.cuda_ipc_way import CudaIpcWay
from kvplan.agents.relocation import regions_of
from kvplan.verification.raw_bytes import Contents
from tests.agents.cuda_ipc.simulated_ipc import (
    ORIGIN,
    cache,
    devices_that_are_left_alone,
    expandable,
    joined,
)
from tests.simulated import Stream
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
        delivers = [ends.after(first, b"one", urgent=False)]
        second = executor.submit(program.plan([2], [3]))
        delivers.append(ends.after(second, b"two", urgent=False))
        third = executor.submit(program.plan([2], [4]))
        assert ends.after(third, b"", urgent=False) is None  # no note
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
        ends.after(slow, b"slow", urgent=False)
        urgent = executor.submit(program.plan([2], [3]), priority="high")
        ends.after(urgent, b"urgent", urgent=True)
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
        deliver = ends.after(first, b"one" * 20_000, urgent=False)
        event.set()
        first.synchronize()
        second = executor.submit(program.plan([2], [3]))
        ends.after(second, b"two", urgent=False)
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
        deliver = ends.after(first, b"one", urgent=False)
        second = executor.submit(program.plan([0], [1]))
        ends.after(second, b"two", urgent=False)
        for each in (first, second):
            each.synchronize()
        devices[0].run()
        assert ends.notes() == []
        deliver(None)
        assert ends.notes() == [b"one", b"two"]


def test_a_long_note_whose_word_is_there_first_comes_whole(devices):
    _, there = cache(devices, 0, 1)
    with joined(there) as ends:
        ends.served.words.store(0, 1)
        parts = note_messages(NOTE, 0, 1, bytes(range(200)) * 300)
        for part in parts:
            assert ends.served.notes() == []
            ends.served.heard(part)
        assert ends.served.notes() == [bytes(range(200)) * 300]
