"""FlashAttention: K and V planes split outside the block, or a pair of paged caches.

Source: vLLM 0.10.2, ``v1/attention/backends/flash_attn.py`` (``get_kv_cache_shape``), for the planes in one tensor;
flash-attention 2, ``flash_attn_with_kvcache`` with a ``block_table``, for the pair.
"""

from __future__ import annotations

from typing import Any, Unpack

from kvplan.backends._tensors import Numbers, check_numbers, layers_of
from kvplan.layout.kvlayout import KVLayout

_EXPECTED = (
    "a layer is one tensor (2, num_blocks, block_tokens, heads, head_dim), or a pair of K and V, each (num_blocks, "
    "block_tokens, heads, head_dim)"
)


def describe(kv_caches: Any, **numbers: Unpack[Numbers]) -> KVLayout:
    """Describe the caches that FlashAttention reads, one entry per layer.

    The rank distinguishes the two forms. Real strides are used, so permuted views (vLLM's HND order under the same
    shape) and padded views need no option.

    Args:
        kv_caches: a list or tuple with one entry per layer, in order of layers, all of one form: a tensor ``(2,
            num_blocks, block_tokens, heads, head_dim)``, or a pair ``(k_cache, v_cache)`` of ``(num_blocks,
            block_tokens, heads, head_dim)``. A single tensor or pair is one layer.
        numbers: ``layer_start``, ``head_start``, ``layers``, ``part``, ``seams``, as
            :meth:`kvplan.KVLayout.from_tensors` takes them.

    Raises:
        LayoutError: a wrong rank, a first extent other than 2, mixed forms, or K and V of different shapes or strides.

    >>> import numpy as np
    >>> print(describe([np.zeros((2, 8, 16, 4, 64), np.float16) for layer in range(3)]))
    layer: kv block token head dim | layer=3 kv=2 block=8 token=16 head=4 dim=64 | float16 on cpu
    >>> k_cache, v_cache = np.zeros((2, 8, 256, 4, 64), np.float16)
    >>> print(describe([(k_cache, v_cache)]))
    layer kv: block token head dim | layer=1 kv=2 block=8 token=256 head=4 dim=64 | float16 on cpu
    """
    check_numbers(numbers)
    entries, paired = layers_of(kv_caches, kv_dim=0, expected=_EXPECTED, other="flashinfer")
    notation = "layer kv: block token head dim" if paired else "layer: kv block token head dim"
    return KVLayout.from_tensors(notation, entries, **numbers)
