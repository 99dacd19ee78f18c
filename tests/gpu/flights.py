"""What tests of transfers in flight share."""

from __future__ import annotations

import torch

import kvplan
from tests.paged_caches import DEVICE_NOTATION, HOST_NOTATIONS, Move, Paged, Pair, pair_of

MOVE = Move([3, 1, 30, 7, 8, 9], [0, 31, 12, 13, 14, 2])


def small_pair(direction: str, **more) -> Pair:
    device = Paged(DEVICE_NOTATION, block=32, dim=4096, padded=True)
    return pair_of(direction, device, Paged(HOST_NOTATIONS["page-first"], block=32, dim=4096), **more)


def warm(executor: kvplan.Executor, *pairs: Pair) -> None:
    """Compile, load and allocate what a first transfer does, so that the next one finds it there."""
    for pair in pairs:
        executor.submit(pair.plan(Move([1], [1]))).synchronize()
        for root in pair.src_roots + pair.dst_roots:
            root.clone()
    torch.cuda.synchronize()
