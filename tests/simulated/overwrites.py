"""Many transfers onto the same few blocks."""

from __future__ import annotations

import numpy as np

import kvplan
from tests.gpu.caches import Move, Pair
from tests.simulated.device import Device
from tests.simulated.executors import paths_in_turn

TINY_RING = {"CHUNK_NBYTES": 1024, "SMALL_CHUNK_NBYTES": 1}


def overwrites(device: Device, executor: kvplan.Executor, pair: Pair, names: list[str], seed: int) -> None:
    """Many transfers onto the same few blocks, in flight at once."""
    rng = np.random.default_rng(seed)
    with paths_in_turn(names):
        for _ in names:
            executor.submit(pair.plan(Move(rng.permutation(9)[:5], rng.permutation(5))))
    device.run()
    pair.check()
