"""Bytes that both processes of a wire can make from a seed, so that a comparison moves none of them."""

from __future__ import annotations

from typing import Any

import numpy as np

SEED, FIRST, SECOND = 0x632BE59BD9B4E019, 0x1F123BB5159A55E5, 0x2545F4914F6CDD1D  # odd: every word differs
COMPARED = 256 << 20  # bytes that are compared at once


def fill(buffer: Any, seed: int) -> None:
    """Write other bytes everywhere; the same ones in each process, on a CPU and on a GPU.

    Args:
        buffer: bytes of numpy or of torch, in one dimension; a multiple of 8.
        seed: other seeds give other bytes.

    >>> one, two = np.zeros(32, np.uint8), np.zeros(32, np.uint8)
    >>> fill(one, 1), fill(two, 1), bool((one == two).all()), len(set(one.tolist())) > 16
    (None, None, True, True)
    """
    if isinstance(buffer, np.ndarray):
        words = buffer.view(np.int64)
        words[:] = np.arange(words.size)
    else:
        import torch

        words = buffer.view(torch.int64)
        words.copy_(torch.arange(words.numel(), device=buffer.device))
    words += (seed * SEED + 1) % (1 << 62)
    for factor, shift in ((FIRST, 31), (SECOND, 29)):
        words *= factor
        words ^= words >> shift
    if not isinstance(buffer, np.ndarray) and buffer.is_cuda:
        torch.cuda.synchronize(buffer.device)


def by_block(pool: Any, notation: str) -> Any:
    """Return a view of a pool whose first axis is the block, and the second one the layer; of words, if rows have any.

    >>> by_block(np.zeros((4, 3, 16), np.uint8), "layer block dim").shape
    (3, 4, 2)
    """
    if pool.shape[2] % 8 == 0:
        if isinstance(pool, np.ndarray):
            pool = pool.view(np.int64)
        else:
            import torch

            pool = pool.view(torch.int64)
    return pool if notation.startswith("block") else pool.swapaxes(0, 1)


def same(mine: Any, here: np.ndarray, theirs: Any, there: np.ndarray) -> bool:
    """Return whether blocks of one pool are those of another, in order; both are by block, and on one device.

    >>> pool = np.arange(24, dtype=np.uint8).reshape(3, 2, 4)
    >>> same(pool, np.array([0, 2]), pool[::-1], np.array([2, 0])), same(pool, np.array([0]), pool, np.array([1]))
    (True, False)
    """
    step = max(COMPARED // (mine.shape[1] * mine.shape[2] * mine.itemsize), 1)
    for start in range(0, len(here), step):
        a, b = here[start : start + step], there[start : start + step]
        if not isinstance(mine, np.ndarray):
            import torch

            a, b = (torch.as_tensor(ids, device=mine.device) for ids in (a, b))
        if not bool((mine[a] == theirs[b]).all()):
            return False
    return True
