"""An executor of the CPU with a transfer that waits, and the calls that an interrupt may break off."""

from __future__ import annotations

import threading
import time
from contextlib import suppress

import numpy as np

import kvplan
from kvplan import KVLayout, TransferError

PATIENCE = 60.0  # seconds


BLOCKS = 16


class Host:
    """An executor of the CPU, one transfer that waits, and one behind it."""

    def __init__(self) -> None:
        self.src = np.random.default_rng(0).integers(1, 256, (BLOCKS, 64), np.uint8)
        self.dst = np.zeros_like(self.src)
        self.program = kvplan.compile(*(KVLayout.from_tensors("block dim", one) for one in (self.src, self.dst)))
        self.executor = kvplan.Executor(policy=kvplan.Policy(threads=2))
        self.executor.submit(self.plan(0)).result()
        self.gate = threading.Event()

    def plan(self, block):
        return self.program.plan([block], [block])

    def submit(self, block, **more):
        return self.executor.submit(self.plan(block), **more)

    def check(self):
        """All goes on: transfers of both priorities, what is in flight ends, and so does a close."""
        try:
            for priority in ("high", "normal"):
                self.gate.set()
                self.submit(1, priority=priority).synchronize(PATIENCE)
                self.submit(2, priority=priority).synchronize(PATIENCE)
            end = time.monotonic() + PATIENCE
            while self.executor.stats().in_flight:
                assert time.monotonic() < end, "a transfer is in flight that nobody runs"
            assert (self.dst[:3] == self.src[:3]).all()
        finally:
            self.gate.set()
            self.close()

    def close(self):
        closing = threading.Thread(target=self.executor.close, daemon=True)
        closing.start()
        closing.join(PATIENCE)
        assert not closing.is_alive(), "the close hangs"


def submit(host):
    return lambda: host.submit(3)


def submit_high(host):
    host.submit(3, priority="high").result()
    return lambda: host.submit(4, priority="high")


def submit_first_high(host):
    return lambda: host.submit(3, priority="high")


def submit_behind(host):
    host.submit(3, after=host.gate)
    return lambda: host.submit(3, priority="high")


def cancel(host):
    transfer = host.submit(3, after=host.gate)
    host.submit(4)
    return transfer.cancel


def cancel_queued(host):
    host.submit(3, after=host.gate)
    return host.submit(4).cancel


def result(host):
    return lambda: host.submit(3).result()


def wait(host):
    transfer = host.submit(3, after=host.gate)

    def waits():
        with suppress(TransferError):
            transfer.synchronize(0.001)

    return waits


def ask(host):
    transfer = host.submit(3)
    return lambda: (transfer.done(), repr(transfer), host.executor.stats())
