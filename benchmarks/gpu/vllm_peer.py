"""vLLM's own offloading worker over caches and rows that are given, and a stand-in where vLLM is not installed.

vLLM's Python is enough: what its batch path ends in is one call of ``cuMemcpyBatchAsync`` over three arrays, and where
its compiled operator is missing the same call is made here. Its Triton kernel is Python, and runs as it is.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections import deque
from collections.abc import Callable, Sequence
from ctypes import addressof, byref, c_size_t
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu.driver.batch_bytes import IN_ANY_ORDER, IN_STREAM_ORDER, Attributes
from kvplan import Descriptors
from kvplan.engines.vllm.worker import JobResult
from kvplan.measure.baselines import MOST_DESCRIPTORS
from kvplan.measure.flights import Line

COMPILED = "vllm._C_stable_libtorch"
BATCH = "cuMemcpyBatchAsync a page"

Copy = Callable[[Descriptors, int], Any]


class Missing(ModuleType):
    """In the place of vLLM's compiled library, which its Python imports and which is not there."""


class Vllm(NamedTuple):
    """The parts of vLLM that are used.

    Attributes:
        version: of the package.
        own_operator: whether the compiled operator is vLLM's, and not the call that stands in for it.
        worker: the module of its worker.
        base, common: the modules of its arguments.
    """

    version: str
    own_operator: bool
    worker: Any
    base: Any
    common: Any

    @property
    def told(self) -> str:
        """The measured vLLM in words."""
        if self.own_operator:
            return f"vLLM {self.version}, whole"
        return f"vLLM {self.version}'s Python; its batch operator by our call of the same driver function"


def load(copy: Copy) -> Vllm | None:
    """Import vLLM's worker; None where vLLM is not installed.

    Args:
        copy: enqueues descriptors on torch's current stream, with an order of accesses to the source.
    """
    if find_spec("vllm") is None:
        return None
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    own = not isinstance(sys.modules.get(COMPILED), Missing) and find_spec(COMPILED) is not None
    if not own:
        sys.modules[COMPILED] = Missing(COMPILED)
    names = "v1.kv_offload.cpu.gpu_worker", "v1.kv_offload.base", "v1.kv_offload.cpu.common"
    worker, base, common = (importlib.import_module(f"vllm.{name}") for name in names)
    if not own:
        worker.ops.swap_blocks_batch = _operator(copy)
    return Vllm(sys.modules["vllm"].__version__, own, worker, base, common)


def _operator(copy: Copy) -> Callable[..., None]:
    def swap_blocks_batch(src: Tensor, dst: Tensor, sizes: Tensor, is_src_access_order_any: bool = False) -> None:
        order = IN_ANY_ORDER if is_src_access_order_any else IN_STREAM_ORDER
        copy(Descriptors(src.numpy(), dst.numpy(), sizes.numpy()), order)

    return swap_blocks_batch


def copy_batch(line: Line, columns: Descriptors, order: int, stream: int) -> None:
    """Copy descriptors by the driver's batch call, with vLLM's order of accesses to the source.

    Args:
        line: its GPU.
        columns: contiguous int64 arrays.
        order: any order is for host memory that nothing writes meanwhile.
        stream: not the default one, which the driver refuses.
    """
    driver, attributes, first = line.device.driver, Attributes(order=order), c_size_t(0)
    src, dst, size = (column.ctypes.data for column in columns)
    for start in range(0, columns.size.size, MOST_DESCRIPTORS):
        count, failed, at = min(MOST_DESCRIPTORS, columns.size.size - start), c_size_t(0), 8 * start
        code = driver.cuMemcpyBatchAsync(dst + at, src + at, size + at, count, addressof(attributes), addressof(first),
                                         1, byref(failed), stream)  # fmt: skip
        driver.check("cuMemcpyBatchAsync", code)


def on_current_stream(line: Line) -> Copy:
    """Descriptors by the driver's batch call, on torch's current stream."""
    return lambda columns, order: copy_batch(line, columns, order, torch.cuda.current_stream().cuda_stream)


class Rows:
    """In the place of vLLM's shared region, as one rank sees it: each row holds a chunk of all layers.

    Args:
        pool: (chunks, bytes) int8.
    """

    is_pinned = True

    def __init__(self, pool: Tensor) -> None:
        self._pool = pool
        self._next = 0

    def create_next_worker_view(self, nbytes: int) -> Tensor:
        """The rows of the next tensor."""
        first, self._next = self._next, self._next + nbytes
        return self._pool[:, first : self._next]

    def cleanup(self) -> None:
        """Nothing of it is the worker's."""


def vllm_worker(vllm: Vllm, caches: Sequence[Tensor], pool: Tensor) -> Any:
    """Make vLLM's worker of one group.

    Args:
        caches: of each layer (blocks, page) int8.
        pool: (chunks, layers * page) int8.
    """
    base, page = vllm.base, caches[0].shape[1]
    tensors = [base.CanonicalKVCacheTensor(cache, page) for cache in caches]
    refs = [base.CanonicalKVCacheRef(k, page) for k in range(len(caches))]
    with mock.patch.object(vllm.worker, "pin_mmap_region"):  # it is pinned
        return vllm.worker.CPUOffloadingWorker(
            base.CanonicalKVCaches(tensors, [refs]), blocks_per_chunk=1, num_cpu_chunks=len(pool),
            mmap_region=Rows(pool),
        )  # fmt: skip


def loads_by(worker: Any) -> str:
    """How vLLM's worker loads."""
    return "12 programs" if hasattr(worker._load_handler._swap_blocks_batch, "keywords") else "batch"


class BatchWorker:
    """Jobs with one descriptor a page, both ways: what is compared where vLLM is not installed.

    Args:
        caches, pool: as :func:`vllm_worker` takes them.
        enqueue: what starts a copy of descriptors and tells by a call whether it has ended.
    """

    def __init__(
        self, caches: Sequence[Tensor], pool: Tensor, enqueue: Callable[[Descriptors, int], Callable[[], bool]]
    ) -> None:
        self._page = caches[0].shape[1]
        self._caches = np.array([cache.data_ptr() for cache in caches], dtype=np.int64)
        self._pool = pool.data_ptr() + np.arange(len(caches), dtype=np.int64) * self._page
        self._strides = caches[0].stride(0), pool.stride(0)
        self._enqueue = enqueue
        self._jobs: deque[tuple[int, int, Callable[[], bool]]] = deque()

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Queue a load."""
        device, host = self._addresses(dst_spec, src_spec)
        return self._submit(job_id, host, device, IN_ANY_ORDER)

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Queue a store."""
        return self._submit(job_id, *self._addresses(src_spec, dst_spec), IN_STREAM_ORDER)

    def _addresses(self, device_spec: Any, host_spec: Any) -> list[np.ndarray[Any, np.dtype[np.int64]]]:
        lists = device_spec.block_ids, host_spec.block_ids
        return [
            (bases[:, None] + ids.astype(np.int64) * stride).ravel()
            for bases, ids, stride in zip((self._caches, self._pool), lists, self._strides, strict=True)
        ]

    def _submit(self, job_id: int, src: Any, dst: Any, order: int) -> bool:
        columns = Descriptors(src, dst, np.full(src.size, self._page, dtype=np.int64))
        self._jobs.append((job_id, src.size * self._page, self._enqueue(columns, order)))
        return True

    def get_finished(self) -> list[JobResult]:
        """Reports of jobs that have ended since the last call."""
        done = []
        while self._jobs and self._jobs[0][2]():
            job, nbytes, _ = self._jobs.popleft()
            done.append(JobResult(job, success=True, transfer_size=nbytes))
        return done

    def shutdown(self) -> None:
        """Nothing is held."""


def on_line(line: Line) -> Callable[[Descriptors, int], Callable[[], bool]]:
    """Starts copies on a stream, behind torch's current one."""

    def enqueue(columns: Descriptors, order: int) -> Callable[[], bool]:
        line.stream.wait_stream(torch.cuda.current_stream())
        copy_batch(line, columns, order, line.handle)
        event = torch.cuda.Event()
        event.record(line.stream)
        return event.query

    return enqueue


def by_memmove(columns: Descriptors, order: int) -> Callable[[], bool]:  # noqa: ARG001  # as the driver's call
    """Copy CPU memory at once."""
    from ctypes import memmove

    for src, dst, size in zip(*(column.tolist() for column in columns), strict=True):
        memmove(dst, src, size)
    return lambda: True


class Specs(NamedTuple):
    """The two id lists of a job, as the worker is given them, and as they are."""

    device: Any
    host: Any
    blocks: np.ndarray[Any, np.dtype[np.int64]]
    chunks: np.ndarray[Any, np.dtype[np.int64]]


def specs_of(vllm: Vllm | None, count: int, total: int, seed: int) -> Specs:
    """A job of random blocks and chunks, in no order."""
    random = np.random.default_rng((count, total, seed))
    blocks, chunks = (random.permutation(total)[:count] for _ in range(2))
    if vllm is not None:
        device = vllm.base.GPULoadStoreSpec(blocks.tolist(), [count], [0])
        return Specs(device, vllm.common.CPULoadStoreSpec(chunks.tolist()), blocks, chunks)
    ids = blocks.astype(np.int32), chunks.astype(np.int32)
    device = SimpleNamespace(block_ids=ids[0], group_sizes=[count], block_indices=[0])
    return Specs(device, SimpleNamespace(block_ids=ids[1]), blocks, chunks)
