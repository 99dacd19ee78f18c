"""Baselines on the CPU: a numpy planner as engines write them, and a floor that no planner can beat."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Int64Array = NDArray[np.int64]
Columns = tuple[Int64Array, Int64Array, Int64Array]


class Stepped(NamedTuple):
    """Addresses of two caches with contiguous blocks, as a numpy planner needs them.

    Attributes:
        src_bases, dst_bases: address of block 0 of every (layer, part).
        src_stride, dst_stride: bytes between blocks.
        nbytes: of a block of one (layer, part).
    """

    src_bases: Int64Array
    dst_bases: Int64Array
    src_stride: int
    dst_stride: int
    nbytes: int


def check(ids: Int64Array, num_blocks: int) -> None:
    """Every id is a block."""
    if ids.size and (ids.min() < 0 or ids.max() >= num_blocks):
        raise IndexError(f"block ids reach from {ids.min()} to {ids.max()}; blocks are 0 to {num_blocks - 1}")


def check_once(ids: Int64Array, num_blocks: int) -> None:
    """No id is named twice."""
    seen = np.zeros(num_blocks, dtype=np.bool_)
    seen[ids] = True
    if np.count_nonzero(seen) != ids.size:
        raise ValueError("a destination block is named twice")


def address(stepped: Stepped, src_ids: Int64Array, dst_ids: Int64Array, num_blocks: int) -> tuple[Int64Array, ...]:
    """Ids checked and turned into bytes from block 0."""
    check(src_ids, num_blocks)
    check(dst_ids, num_blocks)
    check_once(dst_ids, num_blocks)
    return src_ids * stepped.src_stride, dst_ids * stepped.dst_stride


def plan_broadcast(stepped: Stepped, src_ids: Int64Array, dst_ids: Int64Array, num_blocks: int) -> Columns:
    """All layers in one broadcast: as fast as plain numpy gets."""
    src_steps, dst_steps = address(stepped, src_ids, dst_ids, num_blocks)
    src = (stepped.src_bases[:, None] + src_steps).ravel()
    dst = (stepped.dst_bases[:, None] + dst_steps).ravel()
    return src, dst, np.full(src.size, stepped.nbytes, dtype=np.int64)


def floor(count: int) -> Columns:
    """Allocate three int64 arrays and fill each, as any flat plan of ``count`` descriptors must."""
    src, dst, size = (np.empty(count, dtype=np.int64) for _ in range(3))
    src.fill(1)
    dst.fill(2)
    size.fill(3)
    return src, dst, size


class Memcpy:
    """numpy's copy of one large array into another, cut evenly over threads.

    Args:
        threads: 1 copies on the calling thread.
    """

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._pool = ThreadPoolExecutor(threads) if threads > 1 else None

    def copy(self, dst: NDArray[np.uint8], src: NDArray[np.uint8]) -> None:
        """Copy all of ``src``."""
        if self._pool is None:
            np.copyto(dst, src)
            return
        cuts = [src.size * k // self.threads for k in range(self.threads + 1)]
        halves = [slice(*pair) for pair in pairwise(cuts)]
        for pending in [self._pool.submit(np.copyto, dst[half], src[half]) for half in halves]:
            pending.result()

    def close(self) -> None:
        """Stop the threads."""
        if self._pool is not None:
            self._pool.shutdown()
