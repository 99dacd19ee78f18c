"""An owner and a visitor of ``cuda_ipc`` on simulated GPUs of one process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

import kvplan
from kvplan import Agent, KVLayout
from tests.open_files import leaves_no_file, open_files
from tests.patience import until
from tests.simulated.drawn import owned
from tests.simulated.ipc import Pieces
from tests.simulated.objects import Tensor
from tests.simulated_driver import SimulatedDriver, simulated

BLOCKS, ROW = 8, 96


@dataclass
class OnGpu:
    """A stream of torch."""

    cuda_stream: int
    device_index: int


def cache(driver: SimulatedDriver, ordinal: int, seed: int = 0) -> tuple[np.ndarray, KVLayout]:
    """A cache of two layers, each an allocation of a GPU."""
    array = np.random.default_rng(seed).integers(0, 256, (2, BLOCKS, ROW), np.uint8)
    return array, KVLayout.from_tensors("layer: block dim", [owned(driver, layer, ordinal) for layer in array])


def two_gpus() -> Iterator[SimulatedDriver]:
    """Two simulated GPUs; afterwards nothing of the transport is left. For a fixture."""
    files = open_files()
    with simulated(2) as driver:
        yield driver
    leaves_no_file(files)


@contextmanager
def expandable(driver: SimulatedDriver, ordinal: int, seed: int = 0) -> Iterator[tuple[np.ndarray, KVLayout]]:
    """The same, in a segment of pieces: the second layer lies in two of them."""
    sizes = (8192, 4096, 4096)
    pieces = Pieces(*sizes)
    array = pieces.array[8192 - 3 * BLOCKS * ROW // 2 :][: 2 * BLOCKS * ROW].reshape(2, BLOCKS, ROW)
    array[:] = np.random.default_rng(seed).integers(0, 256, array.shape, np.uint8)
    driver.pieces += pieces.files
    driver.own(pieces.array, ordinal)
    try:
        yield array, KVLayout.from_tensors("layer: block dim", [Tensor(layer, f"cuda:{ordinal}") for layer in array])
    finally:
        driver.pieces.clear()
        pieces.close()


class Both:
    """An owner with a cache of one GPU, and a visitor whose executor is of the first."""

    def __init__(self, driver: SimulatedDriver, path: str = "kernel", owner: int = 1) -> None:
        self.driver = driver
        self.theirs, there = cache(driver, owner, 1)
        self.mine, self.here = cache(driver, 0, 2)
        self.executor = kvplan.Executor("cuda:0", kvplan.Policy(path=path))
        self.owner = Agent("owner", {"kv": there}, transports=("cuda_ipc",))
        self.visitor = Agent("visitor", {}, transports=("cuda_ipc",), executor=self.executor)
        self.peer = self.visitor.meet(self.owner.card())
        self.load = kvplan.compile(self.peer.layouts["kv"], self.here)
        self.store = kvplan.compile(self.here, self.peer.layouts["kv"])

    def notes(self, count):
        """Notes that have come, once their words are written."""
        found = []

        def come():
            self.driver.finish()
            found.extend(self.owner.notes())
            return len(found) >= count

        until(come)
        return found

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.visitor.close()
        self.owner.close()
        self.executor.close()
