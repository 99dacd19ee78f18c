"""An owner and a visitor of ``cuda_ipc`` on simulated GPUs of one process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import numpy as np

import kvplan
from kvplan import Agent, KVLayout
from kvplan.cuda.ipc import openings
from tests.open_files import leaves_no_file, open_files
from tests.patience import until
from tests.simulated import Device, Tensor
from tests.simulated.pieces import Pieces

BLOCKS, ROW = 8, 96


def gpus(count: int = 2, seed: int = 0) -> list[Device]:
    """Simulated GPUs of one machine."""
    first = Device(seed)
    found = [first, *(Device(ordinal=k, beside=first) for k in range(1, count))]
    for each in found:
        each.driver.visible = count
    return found


@contextmanager
def driven(devices: list[Device]) -> Iterator[None]:
    """The transport takes these GPUs."""
    with ExitStack() as stack:
        for module in ("cuda_ipc_owner", "cuda_ipc_way"):
            stack.enter_context(mock.patch(f"kvplan.agents.cuda_ipc.{module}.Device", devices.__getitem__))
        stack.enter_context(mock.patch("kvplan.agents.cuda_ipc.cuda_ipc_way.driver", return_value=devices[0].driver))
        process = openings._Process(openings.generation())
        stack.enter_context(mock.patch.object(openings, "_processes", [process]))
        yield


def cache(devices: list[Device], ordinal: int, seed: int = 0) -> tuple[np.ndarray, KVLayout]:
    """A cache of two layers, each an allocation of a GPU."""
    array = np.random.default_rng(seed).integers(0, 256, (2, BLOCKS, ROW), np.uint8)
    for device in devices:
        for layer in array:
            device.own(layer, ordinal)
    tensors = [Tensor(layer, f"cuda:{ordinal}") for layer in array]
    return array, KVLayout.from_tensors("layer: block dim", tensors)


def devices_that_are_left_alone() -> Iterator[list[Device]]:
    """Two simulated GPUs, which the transport takes; afterwards nothing of it is left. For a fixture."""
    found = gpus()
    files = open_files()
    with driven(found):
        yield found
        assert_nothing_is_left(found)
    leaves_no_file(files)


@contextmanager
def expandable(devices: list[Device], ordinal: int, seed: int = 0) -> Iterator[tuple[np.ndarray, KVLayout]]:
    """The same, in a segment of pieces: the second layer lies in two of them."""
    sizes = (8192, 4096, 4096)
    pieces = Pieces(*sizes)
    array = pieces.array[8192 - 3 * BLOCKS * ROW // 2 :][: 2 * BLOCKS * ROW].reshape(2, BLOCKS, ROW)
    array[:] = np.random.default_rng(seed).integers(0, 256, array.shape, np.uint8)
    devices[0].driver.pieces += pieces.files
    for device in devices:
        device.own(pieces.array, ordinal)
    try:
        yield array, KVLayout.from_tensors("layer: block dim", [Tensor(layer, f"cuda:{ordinal}") for layer in array])
    finally:
        devices[0].driver.pieces.clear()
        pieces.close()


class Both:
    """An owner with a cache of one GPU, and a visitor whose executor is of the first."""

    def __init__(self, devices, executor, owner=1, transports=("cuda_ipc",)) -> None:
        self.devices = devices
        self.theirs, there = cache(devices, owner, 1)
        self.mine, self.here = cache(devices, 0, 2)
        self.owner = Agent("owner", {"kv": there}, transports=transports)
        self.visitor = Agent("visitor", {}, transports=transports, executor=executor)
        self.peer = self.visitor.meet(self.owner.card())
        self.load = kvplan.compile(self.peer.layouts["kv"], self.here)
        self.store = kvplan.compile(self.here, self.peer.layouts["kv"])

    def notes(self, count):
        """Notes that have come, once their words are written."""
        found = []

        def come():
            self.devices[0].run()
            found.extend(self.owner.notes())
            return len(found) >= count

        until(come)
        return found

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.visitor.close()
        self.owner.close()


def assert_nothing_is_left(devices: list[Device]) -> None:
    for device in devices:
        device.run()
        entries = device.driver
        assert (entries.mapped, entries.registered) == ({}, set())
        assert (entries.handles, entries.spans, entries.held) == ({}, {}, {})
        assert not device.made - device.theirs, "an event was left"
    assert openings.mappings() == 0
