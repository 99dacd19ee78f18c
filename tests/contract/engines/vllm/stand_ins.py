"""What vLLM 0.33 gives its offloading worker, as stand-ins with the members that are read, and rows to move between."""

from __future__ import annotations

from contextlib import contextmanager
from itertools import accumulate
from types import SimpleNamespace

import numpy as np
import pytest

from kvplan.engines.vllm.worker import Worker

torch = pytest.importorskip("torch", reason="vLLM's tensors are torch's")


def rows_of(sizes, blocks, *, seed=None, gap=0):
    """One allocation with rows of several tensors side by side, and a gap behind them: (blocks, sum of sizes + gap)."""
    ends = list(accumulate(sizes))
    whole = torch.zeros((blocks, ends[-1] + gap), dtype=torch.int8)
    if seed is not None:
        whole.copy_(torch.from_numpy(np.random.default_rng(seed).integers(-128, 128, whole.shape, dtype=np.int8)))
    return whole, [whole[:, end - size : end] for size, end in zip(sizes, ends, strict=True)]


def reference(tensor, nbytes, mapping=None):
    return SimpleNamespace(tensor_idx=tensor, page_size_bytes=nbytes, mapping=mapping)


def run(local, canonical, nbytes, number=1, strides=(0, 0)):
    return SimpleNamespace(local_offset=local, canonical_offset=canonical, fragment_size=nbytes, num_fragments=number,
                           local_stride=strides[0], canonical_stride=strides[1])  # fmt: skip


def mapping(runs, local, canonical, writers=(0, 1)):
    return SimpleNamespace(runs=tuple(runs), local_page_size_bytes=local, canonical_page_size_bytes=canonical,
                           writer_index=writers[0], num_writers=writers[1])  # fmt: skip


def on_device(blocks, sizes=None, firsts=None):
    """vLLM's GPULoadStoreSpec."""
    sizes = [len(blocks)] if sizes is None else sizes
    ids = np.array(blocks, dtype=np.int32)
    return SimpleNamespace(block_ids=ids, group_sizes=sizes, block_indices=firsts or [0] * len(sizes))


def on_host(chunks):
    """vLLM's CPULoadStoreSpec."""
    return SimpleNamespace(block_ids=np.array(chunks, dtype=np.int32))


@contextmanager
def workers():
    """What makes workers; they are shut down at its end."""
    made = []

    def make(*args, **options):
        made.append(Worker(*args, **options))
        return made[-1]

    try:
        yield make
    finally:
        for worker in made:
            worker.shutdown()


def finish(worker, job):
    worker.wait({job})
    (result,) = worker.get_finished()
    assert result.job_id == job
    return result


def two_layers(make, blocks_per_chunk=1, **options):
    cache, device = rows_of([64, 64], 12, seed=1)
    pool, host = rows_of([64 * blocks_per_chunk] * 2, 6)
    worker = make([[reference(0, 64), reference(1, 64)]], device, host, blocks_per_chunk, **options)
    return worker, cache, pool
