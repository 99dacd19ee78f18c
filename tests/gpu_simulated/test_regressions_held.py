"""What a review of the GPU executor found, each as a test that failed then: the ring, and what is held how long."""

from __future__ import annotations

import threading
import weakref
from unittest import mock

import pytest

import kvplan
from kvplan.execute.gpu import reaper
from kvplan.execute.gpu.resources import Limits
from kvplan.plan import staging
from kvplan.program.passes import compile_geometry
from tests.paged_caches import DEVICE_NOTATION, Move, Paged
from tests.patience import PATIENCE
from tests.simulated import Device, Stream
from tests.simulated.executors import MOVE, POOL, OnDevice, both_ways, executor_on, pair_on
from tests.simulated.lifetime import tensors_of, wait_until_gone


@both_ways
def test_a_batch_of_the_ring_that_the_driver_refuses_is_named_by_its_copy(direction):
    device = Device(1)
    pair = pair_on(device, direction)
    with executor_on(device, "staged", limits=Limits(batch_nbytes=0)) as executor:
        device.fail("cuMemcpyBatchAsync")
        with pytest.raises(kvplan.TransferError, match=r": descriptor \d+ of \d+, \d+ bytes from 0x\w+ to 0x\w+"):
            executor.submit(pair.program.plan(MOVE.src, MOVE.dst))
        executor.submit(pair.plan(MOVE)).synchronize()
        pair.check()


def test_what_the_ring_knows_of_a_program_dies_with_it():
    device = Device(5)
    with executor_on(device, "staged") as executor:
        tables, references = executor._backend.resources.tables, []
        for k in range(4):
            dim = 32 * (k + 1)
            pair = pair_on(device, "load", OnDevice(DEVICE_NOTATION, dim=dim), Paged(POOL.notation, dim=dim))
            executor.submit(pair.plan(MOVE)).synchronize()
            references += [weakref.ref(group) for group in pair.program.program.groups]
        assert all(reference() in staging._known for reference in references)
        assert len(tables._known) == len(references) == 4
        del pair
        compile_geometry.cache_clear()
        wait_until_gone(references, device)
        assert not tables._known


@pytest.mark.parametrize(("most", "chunk", "slots"), [(11 << 19, None, 2), (5_500_000, 1_100_032, 4), (9 << 18, 9 << 16,
                         4)])  # fmt: skip
def test_a_ring_takes_no_byte_more_than_it_may(most, chunk, slots):
    device = Device(2)
    pair = pair_on(device, "load")
    with executor_on(device, "staged", staging_bytes=most, chunk_bytes=chunk) as executor:
        before = executor._backend.resources.memory.nbytes
        executor.submit(pair.plan(MOVE)).synchronize()
        ring = executor._backend.paths["staged"]._rings["load"]
        assert (ring.slots, ring.piece.nbytes) == (slots, slots * ring.slot_nbytes)
        assert most - ring.slot_nbytes < ring.piece.nbytes <= most
        assert executor._backend.resources.memory.nbytes - before == ring.piece.nbytes + (
            1 << 20
        )  # and a block of tables
        pair.check()


@pytest.mark.parametrize("why", ["device", "elsewhere"])
def test_what_was_refused_is_not_held(why):
    device = Device()
    with executor_on(device, "staged") as executor:
        pair = pair_on(device, "device")
        if why == "elsewhere":
            there = OnDevice(DEVICE_NOTATION, dim=96, ordinal=1)
            pair = pair_on(device, "load", there)
        references = [weakref.ref(each) for each in tensors_of(pair)]
        for k in range(3):
            plan = pair.program.plan([k], [8 - k])
            references.append(weakref.ref(plan.parts[0].units))
            with pytest.raises(kvplan.PathError, match="stage" if why == "device" else "cuda:1") as refusal:
                executor.submit(plan)
            del plan, refusal
        del pair
        if why == "elsewhere":
            del there
        wait_until_gone(references, device)


def test_a_record_that_was_refused_leaves_no_event():
    device = Device(1)
    pair = pair_on(device, "load")
    with executor_on(device, "copy_engine") as executor:
        user = Stream(device.stream())
        executor.submit(pair.plan(MOVE), after=user).synchronize()
        executor._backend.reap()
        before = len(device.recorded)
        for _ in range(20):
            device.fail("cuEventRecord")
            with pytest.raises(kvplan.TransferError, match="cuEventRecord"):
                executor.submit(pair.program.plan([1], [2]), after=user)
        assert len(device.recorded) == before == len(executor._backend.resources.events)
        pair.check()


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


def test_an_exit_counts_what_waits_for_an_after_that_never_comes():
    device, happened = Device(1), threading.Event()
    pair = pair_on(device, "load")
    with executor_on(device, "copy_engine", limits=Limits(exit_seconds=0.1)) as executor:
        user = device.stream()
        device.gate(user)
        executor.submit(pair.plan(Move([8], [8])), after=Stream(user))
        waiting = [executor.submit(pair.plan(Move([k], [k])), after=happened) for k in range(3)]
        try:
            with (
                mock.patch.object(reaper, "_live", {executor._backend.reaper}),
                pytest.warns(RuntimeWarning, match="^at exit, 4 transfers of a GPU were given up"),
            ):
                reaper._drain_at_exit()
        finally:
            happened.set()
        assert not waiting[0].done()
    assert all(transfer.done() for transfer in waiting)
    pair.check()


class Broken:
    def synchronize(self) -> None:
        raise RuntimeError("it never happened")


def test_what_was_refused_for_a_failed_after_is_not_held_by_it():
    device = Device()
    with executor_on(device, "kernel") as executor:
        pair = pair_on(device, "load")
        failed = executor.submit(pair.plan(MOVE), after=Broken())
        failed._issued.wait()
        pair = pair_on(device, "load")
        references = [weakref.ref(each) for each in tensors_of(pair)]
        for k in range(3):
            with pytest.raises(kvplan.TransferError, match="never happened"):
                executor.submit(pair.program.plan([k], [8 - k]), after=failed)
        del pair
        wait_until_gone(references, device)
        assert repr(failed).endswith("failed)")
