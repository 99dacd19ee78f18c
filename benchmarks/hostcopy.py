"""How fast the host path copies runs of one length, against numpy's memcpy of one large array on as many threads."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

import kvplan
from benchmarks.call_costs import interleaved
from benchmarks.numpy_baselines import Memcpy
from benchmarks.problems import Scale, scattered
from benchmarks.record import Row

HELD_NBYTES = 8 << 10  # the run length that the limit speaks of
TOKENS = 16


class Pools(NamedTuple):
    """Two caches of the same blocks, each within one large array, so that the ceiling copies the same memory.

    Attributes:
        src: bytes of ``src_view``, (layer, kv, block, run).
        dst: bytes of ``dst_view``, (block, layer, kv, run).
    """

    src: NDArray[np.uint8]
    dst: NDArray[np.uint8]
    src_view: NDArray[np.uint8]
    dst_view: NDArray[np.uint8]

    @classmethod
    def of(cls, layers: int, blocks: int, run_nbytes: int) -> Pools:
        """Filled with bytes of no pattern."""
        nbytes = layers * 2 * blocks * run_nbytes
        src = np.random.default_rng(run_nbytes).integers(0, 256, nbytes, dtype=np.uint8)
        dst = np.zeros(nbytes, dtype=np.uint8)
        return cls(src, dst, src.reshape(layers, 2, blocks, run_nbytes), dst.reshape(blocks, layers, 2, run_nbytes))

    def program(self) -> kvplan.CopyProgram:
        """Layer by layer to page by page: a run for each (layer, part) of a block."""
        layers, parts, blocks, run_nbytes = self.src_view.shape
        inner = (TOKENS, 1, run_nbytes // TOKENS)
        src = [layer.reshape(parts, blocks, *inner) for layer in self.src_view]
        dst = self.dst_view.reshape(blocks, layers, parts, *inner)
        return kvplan.compile(
            kvplan.KVLayout.from_tensors("layer: kv block token head dim", src),
            kvplan.KVLayout.from_tensors("block layer kv token head dim", dst),
        )


def copying(scale: Scale) -> list[Row]:
    """GB/s of blocks in random order, by run length and threads."""
    rows = []
    for run_nbytes in scale.run_nbytes:
        blocks = max(scale.copy_nbytes // (scale.layers * 2 * run_nbytes), 1)
        pools = Pools.of(scale.layers, blocks, run_nbytes)
        plan = plan_of(pools)
        rows += [_copying(scale, pools, plan, run_nbytes, threads) for threads in scale.threads]
    return rows


def plan_of(pools: Pools) -> kvplan.Plan:
    """All blocks, in random order on both sides."""
    blocks = pools.dst_view.shape[0]
    return pools.program().plan(*scattered(blocks, blocks))


def verify(pools: Pools) -> None:
    """The bytes are where they belong.

    Raises:
        RuntimeError: they are not.
    """
    blocks = pools.dst_view.shape[0]
    src_ids, dst_ids = scattered(blocks, blocks)
    for src_block, dst_block in zip(src_ids, dst_ids, strict=True):
        if not np.array_equal(pools.dst_view[dst_block], pools.src_view[:, :, src_block]):
            raise RuntimeError(f"block {src_block} did not arrive as block {dst_block}")


def _copying(scale: Scale, pools: Pools, plan: kvplan.Plan, run_nbytes: int, threads: int) -> Row:
    ceiling = Memcpy(threads)
    with kvplan.Executor("cpu", kvplan.Policy(path="host", threads=threads)) as executor:
        pools.dst[:] = 0
        executor.submit(plan).result()
        verify(pools)
        seconds = interleaved(
            {
                "ours": lambda: executor.submit(plan).synchronize(),
                "memcpy": partial(ceiling.copy, pools.dst, pools.src),
            },
            small=scale.small,
            large=scale.large,
        )
    ceiling.close()
    speed = {name: plan.nbytes / value / 1e9 for name, value in seconds.items()}
    held = run_nbytes == HELD_NBYTES
    size = f"{run_nbytes} B" if run_nbytes < 1024 else f"{run_nbytes >> 10} KiB"
    return Row("host copy", f"runs of {size}, {threads} thread{'s' * (threads > 1)}", "GB/s", speed["ours"],
               {"numpy memcpy": speed["memcpy"]}, 0.9 * speed["memcpy"] if held else None,
               "0.9 x memcpy" if held else "", more_is_better=True,
               detail={"run_nbytes": run_nbytes, "threads": threads, "nbytes": plan.nbytes})  # fmt: skip
