"""Small caches in host memory, for what is refused."""

from __future__ import annotations

import numpy as np

from kvplan import (
    KVLayout,
)


def cache(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.uint8)


def paged(num_blocks=8, token=4, head=2, dim=8, notation="block token head dim", **kwargs) -> KVLayout:
    return KVLayout.from_tensors(notation, cache(num_blocks, token, head, dim), **kwargs)
