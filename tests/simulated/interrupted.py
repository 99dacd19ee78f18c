"""An executor of a simulated GPU, and the calls that an interrupt may break off."""

from __future__ import annotations

import threading
import time

from tests.interrupts import Interrupt
from tests.paged_caches import Move
from tests.simulated.device import Device
from tests.simulated.executors import executor_on, pair_on
from tests.simulated.objects import Stream

PATIENCE = 60.0  # seconds


def at_once(executor, pair, gate, user):
    return lambda: executor.submit(pair.program.plan(MOVE.src, MOVE.dst))


def behind_a_stream(executor, pair, gate, user):
    return lambda: executor.submit(pair.program.plan(MOVE.src, MOVE.dst), after=Stream(user), priority="high")


def by_the_lane(executor, pair, gate, user):
    return lambda: executor.submit(pair.program.plan(MOVE.src, MOVE.dst), after=gate)


def and_its_result(executor, pair, gate, user):
    return lambda: executor.submit(pair.program.plan(MOVE.src, MOVE.dst)).result()


def and_a_wait(executor, pair, gate, user):
    transfer = executor.submit(pair.program.plan(MOVE.src, MOVE.dst), by_layer=True)
    return lambda: (transfer.wait_layer(0, Stream(user)), transfer.wait(Stream(user)), transfer.done())


def and_a_cancel(executor, pair, gate, user):
    transfer = executor.submit(pair.program.plan(MOVE.src, MOVE.dst), after=gate)
    executor.submit(pair.plan(Move([7], [5])))
    return lambda: (transfer.cancel(), executor.stats())


MOVE = Move([3, 1, 8, 5], [0, 7, 2, 4])


CALLS = [at_once, behind_a_stream, by_the_lane, and_its_result, and_a_wait, and_a_cancel]


def interrupted_on_a_gpu(call, path, at, *, warm, jumps=False):
    """Whether a call was interrupted at a point; and that all goes on."""
    device, gate = Device(at), threading.Event()
    pair = pair_on(device, "load" if at % 2 else "store")
    interrupt = Interrupt(at, jumps=jumps)
    try:
        with executor_on(device, path) as executor:
            device.gates.append(gate)
            if warm:
                executor.submit(pair.plan(Move([0], [1]))).synchronize(PATIENCE)
            user = device.stream()
            todo = call(executor, pair, gate, user)
            interrupted = interrupt.within(todo)
            gate.set()
            executor.submit(pair.plan(Move([6], [6])), priority="high").synchronize(PATIENCE)
            executor.submit(pair.plan(MOVE)).synchronize(PATIENCE)
            end = time.monotonic() + PATIENCE
            while executor.stats().in_flight:
                executor._backend.reap()
                assert time.monotonic() < end, "a transfer is in flight that nobody ends"
            device.run()
            pair.check()
            closing = threading.Thread(target=executor.close, daemon=True)
            closing.start()
            closing.join(PATIENCE)
            assert not closing.is_alive(), "the close hangs"
    except BaseException as error:
        raise AssertionError(f"interrupted at point {at}, {interrupt.where}") from error
    return interrupted


PATHS = ["kernel", "staged", "copy_engine"]


def points_on_a_gpu(call, path, *, warm, jumps=False):
    """How many points there are where a call can be interrupted."""
    device, gate = Device(1), threading.Event()
    pair = pair_on(device, "load")
    with executor_on(device, path) as executor:
        if warm:
            executor.submit(pair.plan(Move([0], [1]))).synchronize(PATIENCE)
        interrupt = Interrupt(0, jumps=jumps)
        interrupt.within(call(executor, pair, gate, device.stream()))
        gate.set()
    return interrupt.points
