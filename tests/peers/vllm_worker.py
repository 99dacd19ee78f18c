"""vLLM's own plan and allocation of a cache, and its offloading worker run on CPU tensors.

Streams, events and the operator that copies are stand-ins; the tensors say that they are a GPU's.
"""

from __future__ import annotations

import ctypes
from contextlib import nullcontext
from types import SimpleNamespace

import torch
from vllm.v1.core.kv_cache_planning import get_kv_cache_config_from_groups
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.kv_offload.cpu import gpu_worker
from vllm.v1.worker.utils import allocate_kv_cache


class OnDevice(torch.Tensor):
    """A CPU tensor that vLLM takes for a GPU's."""

    is_cuda = True


class Clock:
    """An event: recorded at once."""

    def __init__(self, enable_timing=False):
        pass

    def record(self, stream):
        pass

    def query(self):
        return True

    def synchronize(self):
        pass

    def elapsed_time(self, other):
        return 1.0


def noted_copies(monkeypatch):
    """Rows of (source, destination, bytes) that vLLM's worker copies from now on."""
    made = []

    def swap(src, dst, sizes, is_src_access_order_any):
        rows = torch.stack([src, dst, sizes], dim=1).tolist()
        made.extend(rows)
        for source, destination, nbytes in rows:
            ctypes.memmove(destination, source, nbytes)

    stream = SimpleNamespace(wait_stream=lambda other: None, wait_event=lambda event: None)
    platform = SimpleNamespace(
        Stream=lambda: stream, current_stream=lambda: stream, stream=lambda stream: nullcontext(),
        is_xpu=lambda: False, is_rocm=lambda: False,
    )  # fmt: skip
    monkeypatch.setattr(gpu_worker, "current_platform", platform)
    monkeypatch.setattr(gpu_worker, "PIN_MEMORY", False)
    monkeypatch.setattr(gpu_worker.torch, "Event", Clock)
    monkeypatch.setattr(gpu_worker.ops, "swap_blocks_batch", swap)
    return made


def allocated(groups, order, blocks, *, kernel_block_sizes=None, rank=0, tp=1, total_heads=2, **parallel):
    """A configuration, vLLM's plan for so many blocks, and vLLM's allocation."""
    layout = KVCacheLayout[order]
    config = SimpleNamespace(
        attention_config=SimpleNamespace(hisparse_config=None),
        cache_config=SimpleNamespace(
            get_resolved_kv_cache_layout=lambda: layout, num_gpu_blocks_override=blocks,
            prefix_cache_retention_interval=None,
        ),
        parallel_config=SimpleNamespace(**{
            "tensor_parallel_size": tp, "prefill_context_parallel_size": 1, "decode_context_parallel_size": 1,
            "cp_kv_cache_interleave_size": 1, "world_size": tp, "rank": rank, **parallel,
        }),
        model_config=SimpleNamespace(get_total_num_kv_heads=lambda: total_heads),
    )  # fmt: skip
    plan = get_kv_cache_config_from_groups(config, groups, available_memory=1)
    return config, plan, allocate_kv_cache(plan, torch.device("cpu"), layout, kernel_block_sizes)
