"""What is refused leaves nothing behind on a simulated GPU: no memory, no event, and an exit counts what waits."""

from __future__ import annotations

import threading
import weakref
from unittest import mock

import pytest

import kvplan
from kvplan.execute.gpu import reaper
from kvplan.execute.gpu.resources import Limits
from tests.paged_caches import DEVICE_NOTATION, Move
from tests.simulated import Device, Stream
from tests.simulated.executors import MOVE, OnDevice, executor_on, pair_on, until_issued
from tests.simulated.lifetime import tensors_of, wait_until_gone


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
            with pytest.raises(kvplan.PathError, match="copies directly" if why == "device" else "cuda:1") as refusal:
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
        until_issued(failed)
        pair = pair_on(device, "load")
        references = [weakref.ref(each) for each in tensors_of(pair)]
        for k in range(3):
            with pytest.raises(kvplan.TransferError, match="never happened"):
                executor.submit(pair.program.plan([k], [8 - k]), after=failed)
        del pair
        wait_until_gone(references, device)
        assert repr(failed).endswith("failed)")
