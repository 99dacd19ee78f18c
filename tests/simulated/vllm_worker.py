"""vLLM's offloading worker on a simulated GPU: its cache, its pool, and the engine's stream."""

from __future__ import annotations

from contextlib import contextmanager
from itertools import accumulate
from types import SimpleNamespace
from unittest import mock

import numpy as np
from numpy.lib.stride_tricks import as_strided

from kvplan.engines.vllm import layer_loads, lines
from kvplan.engines.vllm import worker as vllm_worker
from kvplan.engines.vllm.worker import Worker
from kvplan.execute.gpu.resources import Limits
from tests.simulated.executors import TIGHT, TINY_RING, executor_on
from tests.simulated.objects import Stream, Tensor

PAGE, LAYERS, BLOCKS, CHUNKS, PER_CHUNK = 96, 3, 16, 6, 3


class Rows(Tensor):
    """Pages of one tensor, with what else is read of torch's rows."""

    ndim = 2

    def storage_offset(self):
        return 0

    def as_strided(self, shape, strides, offset):
        return Tensor(as_strided(self.array.reshape(-1)[offset:] if self.array.flags.c_contiguous
                                 else self.array[0, offset:], shape, strides), self.device)  # fmt: skip


def side(root, sizes, device):
    ends = list(accumulate(sizes))
    return [Rows(root[:, end - size : end], device) for size, end in zip(sizes, ends, strict=True)]


def spec(blocks, first=0):
    return SimpleNamespace(block_ids=blocks, group_sizes=[len(blocks)], block_indices=[first])


def chunks(*ids):
    return SimpleNamespace(block_ids=list(ids))


@contextmanager
def worker_on(device, path):
    """A worker of one group, its cache, its pool as (chunk, layer, block, byte), and the engine's stream."""
    rng = np.random.default_rng(1)
    cache = rng.integers(-128, 128, (BLOCKS, LAYERS * PAGE), dtype=np.int8)
    pool = np.zeros((CHUNKS, LAYERS * PER_CHUNK * PAGE), np.int8)
    device.pin(pool)
    group = [SimpleNamespace(tensor_idx=k, page_size_bytes=PAGE, mapping=None) for k in range(LAYERS)]
    stream, limits = device.stream(), Limits(**TIGHT | TINY_RING)
    with (
        executor_on(device, path, limits=limits) as regular,
        executor_on(device, path, limits=limits) as expedited,
        mock.patch.object(vllm_worker, "Executor", side_effect=[regular, expedited]),
        mock.patch.object(lines, "current_stream", return_value=Stream(stream)),
        mock.patch.object(layer_loads, "current_stream", return_value=Stream(stream)),
    ):  # fmt: skip
        worker = Worker([group], side(cache, [PAGE] * LAYERS, "cuda:0"),
                        side(pool, [PAGE * PER_CHUNK] * LAYERS, "cpu"), PER_CHUNK)  # fmt: skip
        try:
            yield worker, cache, pool.reshape(CHUNKS, LAYERS, PER_CHUNK, PAGE), stream
        finally:
            device.eager = True  # otherwise a shutdown waits forever
            worker.shutdown()


def one(worker, job):
    worker.wait({job})
    (result,) = worker.get_finished()
    assert result.job_id == job
    return result
