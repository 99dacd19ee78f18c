"""Many transfers onto the same few blocks, and a source that changes."""

from __future__ import annotations

import numpy as np

import kvplan
from tests.paged_caches import Move, Pair
from tests.simulated.device import Device
from tests.simulated.executors import paths_in_turn

TINY_RING = {"chunk_nbytes": 1024, "small_chunk_nbytes": 1}


def overwrites(device: Device, executor: kvplan.Executor, pair: Pair, names: list[str], seed: int) -> None:
    """Many transfers onto the same few blocks, in flight at once."""
    rng = np.random.default_rng(seed)
    with paths_in_turn(names):
        moves = [Move(rng.permutation(9)[:5], rng.permutation(5)) for _ in names]
        for transfer in [executor.submit(pair.plan(move)) for move in moves]:
            transfer.await_issue()
    device.run()
    pair.check()


def renewal(device: Device, stream: int, pair: Pair, seed: int) -> None:
    """Let a stream write new bytes into the source of a pair, behind what the stream has; and expect them."""
    for root, fresh in zip(pair.src_roots, pair.src.random(seed), strict=True):
        device.put(stream, lambda root=root, fresh=fresh: root.__setitem__(slice(None), fresh))
    for want, fresh in zip(pair.src_bytes, pair.src.random(seed), strict=True):
        want[:] = fresh
