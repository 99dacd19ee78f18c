"""TensorRT-LLM: pools of blocks that hold all layers, primary on the GPU and secondary in pinned host memory.

Source: TensorRT-LLM 1.2, ``batch_manager/kvCacheManager.cpp`` (``allocatePools``: both pools are ``(blocks, layers,
kv_factor, heads * tokens * dim)``; ``kv_factor`` is 1 if there is only K, as in MLA), ``kvCacheManager.h``
(``getBlockSize``: inside, ``(heads, tokens, dim)``) and ``_torch/pyexecutor/resource_manager.py``
(``KVCacheManager.get_buffers``: the order inside is the attention backend's, ``"HND"`` or ``"NHD"``); for version 2,
``runtime/kv_cache_manager_v2/_storage/_core.py``, whose pools are slots of one size on every tier. We read these in
the public repository and did not install the wheel, which is too large.
"""

from __future__ import annotations

from typing import Any, Unpack

from kvplan.backends._tensors import PAGE, Numbers, check_numbers, check_option, content_dims, rank_of
from kvplan.errors import LayoutError
from kvplan.layout.kvlayout import KVLayout

_EXPECTED = (
    "a pool is (blocks, layers, kv_factor, elements a block) with tokens_per_block= and num_kv_heads=, or (blocks, "
    "layers, kv_factor, and heads, tokens, dim in the order of kv_layout), or slots (slots, bytes)"
)


def describe(
    pool: Any,
    *,
    kv_layout: str = "HND",
    tokens_per_block: int | None = None,
    num_kv_heads: int | None = None,
    whole_blocks: bool = False,
    **numbers: Unpack[Numbers],
) -> KVLayout:
    """Describe one pool, primary or secondary; a manager; or the slots of version 2.

    Layers of different head counts or windows are in separate pools: describe each pool, with ``layers=``. The pools of
    NVFP4 block scales have the same form (``part="scale"``, one byte per 16 values). The indexer's pool has
    ``kv_factor`` 1 (``part="index", whole_blocks=True``). Pools of recurrent states are layer-first and hold no tokens:
    use ``backends.state``.

    Args:
        pool: a tensor ``(blocks, layers, kv_factor, heads * tokens * dim)``, the same with its last dim unfolded in the
            order of ``kv_layout``, or ``(slots, bytes of a slot)``; a list of the per-layer views ``(blocks,
            kv_factor, ...)`` that ``get_buffers`` returns; a list of several pools of slots that share slot ids; or a
            ``KVCacheManager``, which brings its own numbers.
        kv_layout: ``"HND"``, which TensorRT-LLM's own kernels read, or ``"NHD"``, which FlashInfer reads there.
        tokens_per_block: token slots per block, if the shape does not show them.
        num_kv_heads: KV heads per block, if the shape does not show them; 1 for MLA.
        whole_blocks: whether the content of each layer of a block is opaque, so that it moves whole.
        numbers: ``layer_start``, ``head_start``, ``layers``, ``part`` (by default ``"kv"``, and ``"slot"`` for slots,
            ``"slot_0"``, ``"slot_1"``, ... for several pools of them), ``seams``, as
            :meth:`kvplan.KVLayout.from_tensors` takes them.

    Raises:
        LayoutError: an unknown kv_layout, a wrong shape, a kv_factor other than 1 and 2, or sizes that contradict the
            shape.

    >>> import numpy as np
    >>> print(describe(np.zeros((8, 32, 2, 16384), np.float16), tokens_per_block=32, num_kv_heads=4))
    block layer kv (head token dim) | layer=32 kv=2 block=8 token=32 head=4 dim=128 | float16 on cpu
    >>> print(describe(np.zeros((8, 61, 1, 1, 32, 576), np.float16)))
    block layer 1 head token dim | layer=61 block=8 token=32 head=1 dim=576 | float16 on cpu
    >>> print(describe(np.zeros((100, 65536), np.uint8)))
    block dim | block=100 dim=65536 | uint8 on cpu | parts slot
    """
    check_numbers(numbers)
    check_option("kv_layout", kv_layout, PAGE)
    told = {"token": tokens_per_block, "head": num_kv_heads}
    sizes = {axis: size for axis, size in told.items() if size is not None}
    if hasattr(pool, "get_buffers"):
        if numbers.get("layers") is not None or numbers.get("layer_start"):
            raise LayoutError("a manager numbers its own layers; drop layers= and layer_start=")
        pool, numbers["layers"] = _buffers(pool, kv_layout)
    nested = isinstance(pool, list | tuple)
    if nested and pool and all(rank_of(entry) == 2 for entry in pool):
        part = numbers.get("part", "slot")
        names = [part] if len(pool) == 1 and "part" in numbers else [f"{part}_{k}" for k in range(len(pool))]
        return KVLayout.merge([
            describe(entry, tokens_per_block=tokens_per_block, num_kv_heads=num_kv_heads, **(numbers | {"part": name}))
            for entry, name in zip(pool, names, strict=True)
        ])  # fmt: skip
    if rank_of(pool) == 2:
        if sizes:
            raise LayoutError(f"shape {tuple(pool.shape)}: slots are opaque; drop tokens_per_block= and num_kv_heads=")
        slots: Numbers = {"part": "slot", **numbers}
        return KVLayout.from_tensors("block dim", pool, **slots)
    first = pool[0] if nested and pool else pool
    if not hasattr(first, "shape"):
        raise LayoutError(f"pool is a {type(pool).__name__} of no tensors; {_EXPECTED}")
    shape = tuple(first.shape)
    factor = 1 if nested else 2  # the dim of kv_factor; a view of one layer has no layer dim
    inside = _inside(shape, factor, PAGE[kv_layout], sizes, whole_blocks=whole_blocks)
    if shape[factor] not in {1, 2}:
        raise LayoutError(f"shape {shape}: dim {factor} is the kv_factor, 1 or 2, not {shape[factor]}; {_EXPECTED}")
    dims = f"{'kv' if shape[factor] == 2 else '1'} {inside}"
    return KVLayout.from_tensors(
        f"layer: block {dims}" if nested else f"block layer {dims}", pool, sizes=sizes, **numbers
    )


def _buffers(manager: Any, kv_layout: str) -> tuple[list[Any], list[int]]:
    """Return the views of a ``KVCacheManager``, one for each layer, and the global numbers of these layers."""
    if not hasattr(getattr(manager, "impl", None), "get_primary_pool_data"):
        raise LayoutError(f"{type(manager).__name__} has no primary pool; version 2 keeps slots: give one tensor "
                          "(slots, bytes of a slot) a pool, over its slot addresses")  # fmt: skip
    numbers = sorted(int(layer) for layer in manager.layer_offsets)
    return [manager.get_buffers(layer, kv_layout=kv_layout) for layer in numbers], numbers


def _inside(shape: tuple[int, ...], factor: int, order: str, sizes: dict[str, int], *, whole_blocks: bool) -> str:
    """Return the notation of one layer of a block: of the dims behind the kv_factor."""
    dims = shape[factor + 1 :]
    if len(dims) not in {1, 3}:
        raise LayoutError(f"shape {shape} has {len(shape)} dims; {_EXPECTED}")
    if whole_blocks:
        if sizes:
            raise LayoutError("whole_blocks=True has no tokens or heads; drop tokens_per_block= and num_kv_heads=")
        return content_dims(len(dims))
    if len(dims) == 3:
        return order
    if len(sizes) < 2:
        raise LayoutError(f"shape {shape} folds heads, tokens and dim into {dims[0]} elements: give tokens_per_block= "
                          "and num_kv_heads=")  # fmt: skip
    return f"({order})"
