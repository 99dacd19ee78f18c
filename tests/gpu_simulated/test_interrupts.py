"""An executor of a simulated GPU stays usable after a KeyboardInterrupt at any point, and a handler may submit there.

What is left at the end, memory, events or a kernel, `executor_on` finds.
"""

from __future__ import annotations

import contextlib
import threading

import pytest

import kvplan
from kvplan.execute.gpu.device_transfer import DeviceTransfer
from tests.interrupts import Interrupt
from tests.paged_caches import Move
from tests.profiles import points
from tests.simulated.device import Device
from tests.simulated.executors import executor_on, pair_on
from tests.simulated.interrupted import (
    CALLS,
    MOVE,
    PATHS,
    PATIENCE,
    and_a_cancel,
    and_its_result,
    at_once,
    behind_a_stream,
    interrupted_on_a_gpu,
    points_on_a_gpu,
)

# What is raised in a finalizer, Python swallows.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("warm", [True, False])
def test_an_executor_of_a_gpu_goes_on_after_an_interrupt(call, path, warm):
    total = points_on_a_gpu(call, path, warm=warm)
    assert total > 10
    for at in points(total):
        interrupted_on_a_gpu(call, path, at, warm=warm)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("call", [at_once, behind_a_stream, and_its_result, and_a_cancel])
def test_a_signal_s_handler_may_submit_at_a_gpu_s_executor_too(call, path):
    for at in points(points_on_a_gpu(call, path, warm=True)):
        device, gate = Device(at), threading.Event()
        pair = pair_on(device, "load" if at % 2 else "store")
        with executor_on(device, path) as executor:
            executor.submit(pair.plan(Move([0], [1]))).synchronize(PATIENCE)
            made = []

            def handler(executor=executor, pair=pair, made=made):
                made.append(executor.submit(pair.plan(Move([2, 4, 6], [3, 5, 6]))))
                made.append(executor.submit(pair.plan(Move([6], [8])), priority="high"))
                made[0].done()
                executor.stats()

            interrupt = Interrupt(at, handler)
            came = interrupt.within(call(executor, pair, gate, device.stream()))
            gate.set()
            executor.submit(pair.plan(MOVE)).synchronize(PATIENCE)
            for transfer in made:
                transfer.synchronize(PATIENCE)
            device.run()
            pair.check()
        if not came:
            break


@pytest.mark.parametrize("call", CALLS)
def test_a_gpu_s_executor_goes_on_after_an_interrupt_at_a_jump_back(call):
    for at in points(points_on_a_gpu(call, "staged", warm=True, jumps=True)):
        interrupted_on_a_gpu(call, "staged", at, warm=True, jumps=True)


@pytest.mark.parametrize("jumps", [True, False])
@pytest.mark.parametrize("do", ["close", "ask"])
@pytest.mark.parametrize("call", [at_once, behind_a_stream, and_its_result, and_a_cancel])
def test_a_handler_may_close_a_gpu_s_executor_and_ask_it_at_any_point_of_a_call(call, do, jumps):
    """It cannot wait for the end there, nor can a finalizer: what it came into is a part of that."""
    for at in points(points_on_a_gpu(call, "kernel", warm=True, jumps=jumps)):
        device, gate = Device(at), threading.Event()
        pair = pair_on(device, "load" if at % 2 else "store")
        with executor_on(device, "kernel") as executor:
            device.gates.append(gate)
            executor.submit(pair.plan(Move([0], [1]))).synchronize(PATIENCE)
            before = [executor.submit(pair.plan(Move([each], [each]))) for each in (4, 5)]

            def handler(executor=executor, before=before, gate=gate, do=do):
                gate.set()
                executor.close() if do == "close" else [one.done() for one in before]
                executor.stats()

            interrupt = Interrupt(at, handler, jumps=jumps)
            todo = call(executor, pair, gate, device.stream())
            with contextlib.suppress(kvplan.TransferError) if do == "close" else contextlib.nullcontext():
                interrupt.within(todo)
            gate.set()
            if do == "ask":
                executor.submit(pair.plan(MOVE)).synchronize(PATIENCE)
        if not interrupt.where:
            break


def test_an_interrupt_behind_the_last_call_borrows_no_events(monkeypatch):
    """The transfer flies, and another thread may end it and give its loans back at any time."""
    device = Device(0)
    pair = pair_on(device, "load")
    with executor_on(device, "kernel") as executor:
        executor.submit(pair.plan(Move([0], [1]))).synchronize(PATIENCE)
        made, borrowed = DeviceTransfer.fly, []

        def cut(transfer, *given):
            made(transfer, *given)
            borrowed.append((transfer, list(transfer._borrowed)))
            raise KeyboardInterrupt

        monkeypatch.setattr(DeviceTransfer, "fly", cut)
        device.eager = False
        with pytest.raises(KeyboardInterrupt):
            executor.submit(pair.plan(Move([2], [3])))
        monkeypatch.undo()
        transfer, events = borrowed[0]
        assert transfer._borrowed == events
        device.eager = True
        device.run()
        executor.submit(pair.plan(Move([4], [5]))).synchronize(PATIENCE)
