"""What else could move the same blocks: each baseline by name, as a call that enqueues one whole transfer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.driver import IN_ANY_ORDER, IN_STREAM_ORDER, Columns
from benchmarks.gpu.memory import Work, words_of
from benchmarks.gpu.rig import Bench

BATCH = "cuMemcpyBatchAsync"
PROGRAMS = "12 programs, 8-byte words"
INDEXING = "torch indexing"
LOOP = "cuMemcpyAsync a run"

Issue = Callable[[], Any]


def batch(bench: Bench, work: Work) -> Issue:
    """One descriptor a run; descriptors are made beforehand and cost nothing here."""
    columns = Columns(*(np.ascontiguousarray(column, dtype=np.int64) for column in work.plan.descriptors()))
    stream = bench.streams[work.plan.direction].cuda_stream
    order = IN_ANY_ORDER if work.plan.direction == "load" else IN_STREAM_ORDER
    return lambda: bench.driver.copy_batch(columns, order, stream)


def twelve_programs(bench: Bench, work: Work) -> Issue:
    """12 programs take descriptors one at a time; these lie on the GPU beforehand and cost nothing here."""
    from benchmarks.gpu import kernels

    src, dst, size = (torch.tensor(column, device=bench.device) for column in work.plan.descriptors())
    stream = bench.streams[work.plan.direction]

    def issue() -> None:
        with torch.cuda.stream(stream):
            kernels.one_at_a_time[(12,)](src, dst, size, size.numel(), WORDS=kernels.BASELINE_WORDS,
                                         num_warps=kernels.BASELINE_WARPS)  # fmt: skip

    return issue


def loop(bench: Bench, work: Work) -> tuple[Issue, int]:
    """A call for each run, of the first runs only; and their bytes."""
    src, dst, size = (column[: bench.scale.loop_runs].tolist() for column in work.plan.descriptors())
    moves, stream = list(zip(dst, src, size, strict=True)), bench.streams[work.plan.direction].cuda_stream
    return lambda: bench.driver.copy_each(moves, stream), sum(size)


def indexing(bench: Bench, work: Work) -> Issue:
    """``index_select`` into a staging tensor, one copy, ``index_copy_``; of a page-first pool and a cache by layer.

    Staging lies in the flat buffers. The host's share of the indexing runs on all cores.
    """
    direction, count = work.plan.direction, work.src_ids.size
    load = direction == "load"
    pool, cache = (work.src, work.dst) if load else (work.dst, work.src)
    pages = words_of(pool.raw[0]).view(pool.layout.num_blocks, len(cache.raw), 2, -1)
    tensors = [cache.planes(raw) for raw in cache.raw]
    host, device = (words_of(raw[: work.nbytes]).view(count, *pages.shape[1:]) for raw in bench.buffers(direction))
    src, dst = torch.from_numpy(work.src_ids), torch.from_numpy(work.dst_ids)
    ids, stream = (dst if load else src).to(bench.device), bench.streams[direction]

    def issue() -> None:
        with torch.cuda.stream(stream):
            if load:
                torch.index_select(pages, 0, src, out=host)
                device.copy_(host, non_blocking=True)
                for layer, tensor in enumerate(tensors):
                    tensor.index_copy_(1, ids, device[:, layer].transpose(0, 1))
            else:
                for layer, tensor in enumerate(tensors):
                    device[:, layer].copy_(tensor.index_select(1, ids).transpose(0, 1))
                host.copy_(device, non_blocking=True)
                stream.synchronize()
                pages.index_copy_(0, dst, host)

    return issue


def gbps(bench: Bench, work: Work, names: tuple[str, ...]) -> dict[str, float]:
    """Each named baseline on the same blocks, once every byte was seen to arrive; the loop moves only some."""
    direction = work.plan.direction
    makers = {BATCH: batch, PROGRAMS: twelve_programs, INDEXING: indexing}
    found = {}
    for name in names:
        if name == LOOP:
            issue, nbytes = loop(bench, work)
            found[name] = bench.issued(direction, nbytes, issue).gbps
        elif name != BATCH or bench.driver.has_batch:
            issue = makers[name](bench, work)
            work.verify(name, issue, bench.device)
            found[name] = bench.issued(direction, work.nbytes, issue).gbps
    return found
