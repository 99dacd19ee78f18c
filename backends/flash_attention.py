"""FlashAttention: K and V planes split outside the block, or a pair of paged caches.

Source: vLLM 0.10.2, ``v1/attention/backends/flash_attn.py`` (``get_kv_cache_shape``), for the planes in one tensor;
flash-attention 2, ``flash_attn_with_kvcache`` with a ``block_table``, for the pair.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvplan.errors import LayoutError
from kvplan.layout.kvlayout import KVLayout

PLANES = "layer: kv block token head dim"
PAIR = "layer kv: block token head dim"

_EXPECTED = (
    "a layer is one tensor (2, num_blocks, block_tokens, heads, head_dim), or a pair of K and V, each (num_blocks, "
    "block_tokens, heads, head_dim)"
)


def describe(
    kv_caches: Any,
    *,
    layer_start: int = 0,
    head_start: int = 0,
    layers: Sequence[int] | None = None,
    seams: Sequence[int] = (),
) -> KVLayout:
    """Describe the caches that FlashAttention reads, one entry a layer.

    Rank alone tells the two forms apart. Real strides are used, so permuted views (vLLM's HND order under the same
    shape) and padded ones need nothing more.

    Args:
        kv_caches: a list or tuple with one entry a layer, in order of layers, all of one form: a tensor ``(2,
            num_blocks, block_tokens, heads, head_dim)``, or a pair ``(k_cache, v_cache)`` of ``(num_blocks,
            block_tokens, heads, head_dim)``. One tensor or one pair by itself is one layer.
        layer_start: global number of the first layer.
        head_start: global number of the first KV head.
        layers: global number of every layer, where they do not follow one another.
        seams: addresses that no descriptor may cross.

    Raises:
        LayoutError: another rank, a leading extent that is not 2, forms mixed, or K and V that differ in shape or
            strides.

    >>> import numpy as np
    >>> print(describe([np.zeros((2, 8, 16, 4, 64), np.float16) for layer in range(3)]))
    layer: kv block token head dim | layer=3 kv=2 block=8 token=16 head=4 dim=64 | float16 on cpu
    >>> k_cache, v_cache = np.zeros((2, 8, 256, 4, 64), np.float16)
    >>> print(describe([(k_cache, v_cache)]))
    layer kv: block token head dim | layer=1 kv=2 block=8 token=256 head=4 dim=64 | float16 on cpu
    """
    caches = [kv_caches] if _rank(kv_caches) or _is_pair(kv_caches) else kv_caches
    if not isinstance(caches, list | tuple):
        raise LayoutError(
            f"kv_caches is a {type(caches).__name__}; give a list with one entry a layer, in order of layers"
        )
    pairs = [_is_pair(cache) for cache in caches]
    for layer, cache in enumerate(caches):
        if not pairs[layer]:
            _check_planes(cache, f"kv_caches[{layer}]")
        if pairs[layer] != pairs[0]:
            raise LayoutError(f"kv_caches[0] and kv_caches[{layer}] are of different forms; describe each form by "
                              "itself and merge")  # fmt: skip
    return KVLayout.from_tensors(
        PAIR if pairs and pairs[0] else PLANES,
        caches,
        layer_start=layer_start,
        head_start=head_start,
        layers=layers,
        seams=seams,
    )


def _rank(value: Any) -> int:
    """Number of dims of a tensor; 0 for what is none."""
    return len(value.shape) if hasattr(value, "shape") else 0


def _is_pair(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) == 2 and all(_rank(half) == 4 for half in value)


def _check_planes(cache: Any, name: str) -> None:
    if isinstance(cache, list | tuple):
        ranks = [_rank(half) for half in cache]
        raise LayoutError(f"{name} is a sequence of {len(cache)} with ranks {ranks}; {_EXPECTED}")
    if not _rank(cache):
        raise LayoutError(f"{name} is a {type(cache).__name__}; {_EXPECTED}")
    shape = tuple(cache.shape)
    if len(shape) != 5:
        raise LayoutError(f"{name} has shape {shape}, {len(shape)} dims; {_EXPECTED}")
    if shape[0] != 2:
        hint = "; where K and V stand second, use backends.flashinfer" if shape[1] == 2 else ""
        raise LayoutError(f"{name} has shape {shape}, whose leading extent {shape[0]} is not 2; {_EXPECTED}{hint}")
