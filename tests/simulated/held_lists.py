"""Transfers whose lists of driver calls are held up on the way, on a simulated GPU."""

from __future__ import annotations

import threading

import kvplan
from tests.paged_caches import Move, Pair
from tests.patience import PATIENCE
from tests.simulated import Device, Stream
from tests.simulated.executors import MOVE

LONG = {"inline_effort": 0, "lane_calls": -1}  # every list is long
BLOCKED = LONG | {"calls_in_flight": 1}  # and is played only so far while the GPU does not go on
LAYERS = {"layer_group_nbytes": 1}
CALLS = {"copy_engine": "cuMemcpyBatchAsync", "copy_engine_2d": "cuMemcpy2DAsync", "kernel": "cuLaunchKernelEx",
         "staged": "cuLaunchKernelEx", "toy": "cuMemcpyAsync"}  # fmt: skip


class Held:
    """A transfer whose list is played only in part, until :meth:`open`."""

    def __init__(self, device: Device, executor: kvplan.Executor, pair: Pair, move: Move = MOVE, **more) -> None:
        self.device, self.user = device, device.stream()
        self.gate = device.gate(self.user)
        device.blocked.clear()
        self.transfer = executor.submit(pair.plan(move), after=Stream(self.user), **more)
        assert device.blocked.wait(PATIENCE)
        assert self.transfer.unplayed

    def open(self) -> None:
        self.device.eager = True
        self.gate.set()


def device_of(seed: int = 3) -> Device:
    """A device on which this thread must never block behind a gate."""
    device = Device(seed, eager=False)
    device.opener = threading.current_thread()
    return device
