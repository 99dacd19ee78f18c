"""Small caches whose statistics can be counted by hand."""

from __future__ import annotations

import numpy as np


def zeros(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.int8)


LAYERED = "layer block token dim"  # layers outermost: a block is a run a layer


PAGED = "block layer token dim"  # blocks outermost: a block is contiguous
