"""Shared pools with content, of this process and of others."""

from __future__ import annotations

import numpy as np

import kvplan
from kvplan import KVLayout

LAYERS, BLOCKS, DIM = 3, 16, 64


def content(seed: int = 0) -> np.ndarray:
    """Bytes of a pool in the order block, layer, dim, which tell their place."""
    return ((np.arange(BLOCKS * LAYERS * DIM) * 7 + seed) % 251).astype(np.uint8).reshape(BLOCKS, LAYERS, DIM)


def pool(seed: int = 0, notation: str = "block layer dim") -> KVLayout:
    """A shared pool with content."""
    like = KVLayout.from_tensors("block layer dim", content(seed))
    made = kvplan.allocate(notation, like=like, shared=True)
    with kvplan.Executor() as executor:
        executor.submit(kvplan.compile(like, made).plan(range(BLOCKS), range(BLOCKS))).synchronize()
    return made
