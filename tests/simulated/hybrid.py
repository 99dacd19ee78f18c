"""Caches of a hybrid model on a simulated GPU: pages of several layers beside a state."""

from __future__ import annotations

import numpy as np

import kvplan
from kvplan.plan.halves import LARGE_RUN
from tests.simulated import Device, Tensor

BLOCKS, LAYERS, PAGE, STATE = 6, 4, 256, LARGE_RUN + 64


class Hybrid:
    """Pages of several layers and a state, on the device and in a pinned pool; the pool's blocks have gaps."""

    def __init__(self, device: Device, direction: str, seed: int = 0) -> None:
        random = np.random.default_rng(seed)
        self.here = [random.integers(0, 256, shape, np.uint8) for shape in ((LAYERS, BLOCKS, PAGE), (BLOCKS, STATE))]
        self.there = [
            random.integers(0, 256, shape, np.uint8) for shape in ((BLOCKS, LAYERS + 1, PAGE), (BLOCKS, STATE + 8))
        ]
        for pool in self.there:
            device.pin(pool)
        sides = [
            (kvplan.KVLayout.from_tensors("layer block dim", Tensor(self.here[0])),
             kvplan.KVLayout.from_tensors("block layer dim", self.there[0][:, :LAYERS])),
            (kvplan.KVLayout.from_tensors("block dim", Tensor(self.here[1]), part="state"),
             kvplan.KVLayout.from_tensors("block dim", self.there[1][:, :STATE], part="state")),
        ]  # fmt: skip
        self.load = direction == "load"
        self.programs = [kvplan.compile(*(pair[::-1] if self.load else pair)) for pair in sides]

    def plan(self, src: list[int], dst: list[int]) -> kvplan.Plan:
        self.moves = list(zip(src, dst, strict=True))
        return kvplan.join([program.plan(src, dst) for program in self.programs])

    def expect(self) -> list[np.ndarray]:
        """The written side as it must be, by indexing."""
        pages, states = (array.copy() for array in (self.here if self.load else self.there))
        for src, dst in self.moves:
            if self.load:
                pages[:, dst] = self.there[0][src, :LAYERS]
                states[dst] = self.there[1][src, :STATE]
            else:
                pages[dst, :LAYERS] = self.here[0][:, src]
                states[dst, :STATE] = self.here[1][src]
        return [pages, states]

    @property
    def written(self) -> list[np.ndarray]:
        return self.here if self.load else self.there
