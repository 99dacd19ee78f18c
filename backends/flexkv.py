"""FlexKV: its flat pools (CPU, SSD or remote) and the GPU caches that it reads, in its three layout types.

Source: FlexKV (the public repository taco-project/FlexKV; not on PyPI), ``flexkv/common/storage.py``
(``KVCacheLayoutType``, ``KVCacheLayout.kv_shape``, ``StorageHandle``), ``flexkv/storage/allocator.py`` (a CPU pool of
any layout is one 1-D tensor) and ``flexkv/integration/vllm/vllm_v1_adapter.py`` (lists of GPU tensors, one per layer;
MLA tensors have three dims). The older names LAYERWISE and BLOCKWISE are LAYERFIRST and BLOCKFIRST here.
"""

from __future__ import annotations

from typing import Any, Unpack

from kvplan.backends._tensors import Numbers, check_numbers
from kvplan.errors import LayoutError
from kvplan.layout.kvlayout import KVLayout

# FlexKV's name of a layout type -> the order of the six dims.
ORDER = {
    "BLOCKFIRST": "block layer kv token head dim",
    "LAYERFIRST": "layer kv block token head dim",
    "LAYERBLOCK": "layer block kv token head dim",
}
_OLDER = {"BLOCKWISE": "BLOCKFIRST", "LAYERWISE": "LAYERFIRST"}

# Axis -> the member of a KVCacheLayout that holds its extent.
_SIZES = {
    "layer": "num_layer", "block": "num_block", "token": "tokens_per_block", "head": "num_head", "dim": "head_size",
}  # fmt: skip


def describe(storage: Any, kv_layout: Any = None, **numbers: Unpack[Numbers]) -> KVLayout:
    """Describe storage of FlexKV: a pool, flat or shaped, or a list of GPU tensors, one per layer.

    Args:
        storage: a tensor with the six dims of its layout type; or a flat 1-D tensor of that many elements, with a
            ``KVCacheLayout``; or a list with one tensor per layer, in order of layers. Its tensors have the same dims
            without the layer dim, or are flat, or for MLA ``(num_blocks, block_tokens, dim)``. A ``StorageHandle`` of
            any of these also works. The kv dim has extent 2, or 1 for MLA.
        kv_layout: FlexKV's ``KVCacheLayout``, or the name of its type: ``"BLOCKFIRST"``, ``"LAYERFIRST"`` or
            ``"LAYERBLOCK"``. A ``StorageHandle`` has its own.
        numbers: ``layer_start``, ``head_start``, ``layers``, ``part`` (``"kv"``, or the name of an extra such as
            ``"index"`` (MLA) or ``"scale"``), ``seams``, as :meth:`kvplan.KVLayout.from_tensors` takes them.

    Raises:
        LayoutError: an unknown type, a flat tensor without a ``KVCacheLayout`` or of a wrong size, a wrong shape, a
            BLOCKFIRST list, or files; also layer groups and packed K and V, whose order in a block is not known.

    >>> import numpy as np
    >>> print(describe(np.zeros((8, 32, 2, 16, 4, 64), np.float16), "BLOCKFIRST"))
    block layer kv token head dim | layer=32 kv=2 block=8 token=16 head=4 dim=64 | float16 on cpu
    >>> print(describe([np.zeros((2, 8, 16, 4, 64), np.float16) for layer in range(3)], "LAYERFIRST"))
    layer: kv block token head dim | layer=3 kv=2 block=8 token=16 head=4 dim=64 | float16 on cpu
    """
    check_numbers(numbers)
    if hasattr(storage, "kv_layout") and hasattr(storage, "data"):
        if kv_layout is not None:
            raise LayoutError("a StorageHandle brings its own kv_layout; drop the argument")
        storage, kv_layout = storage.data, storage.kv_layout
    name = _type_name(kv_layout)
    sizes, factor = _told(kv_layout)
    nested = isinstance(storage, list | tuple)
    first = storage[0] if nested and storage else storage
    if not hasattr(first, "shape"):
        raise LayoutError(f"storage is a {type(storage).__name__} of no tensors; FlexKV's files are not in memory, and "
                          "a TensorSharedHandle is described by its get_tensor()")  # fmt: skip
    if nested and name == "BLOCKFIRST":
        raise LayoutError("a list of tensors is LAYERFIRST or LAYERBLOCK, one a layer; BLOCKFIRST is one tensor for "
                          "all layers (TensorRT-LLM's: backends.tensorrt_llm)")  # fmt: skip
    if nested and sizes and len(storage) != sizes["layer"]:
        raise LayoutError(f"{len(storage)} tensors, and num_layer is {sizes['layer']}; give one tensor a layer (for "
                          "SGLang's K and V lists, backends.sglang)")  # fmt: skip
    order = ORDER[name].replace("layer ", "") if nested else ORDER[name]
    dims, sizes = _dims(tuple(first.shape), order, sizes, factor)
    return KVLayout.from_tensors(f"layer: {dims}" if nested else dims, storage, sizes=sizes, **numbers)


def _type_name(kv_layout: Any) -> str:
    """Return the name of the layout type of a KVCacheLayout, of its type, or of a string."""
    kind = getattr(kv_layout, "type", kv_layout)
    given = kind if isinstance(kind, str) else getattr(kind, "name", None)
    name = _OLDER.get(str(given), str(given))
    if name not in ORDER:
        what = f"a {type(kind).__name__}" if given is None else repr(given)
        raise LayoutError(f"kv_layout is {what}; give a KVCacheLayout, or one of {', '.join(map(repr, ORDER))}")
    return name


def _told(kv_layout: Any) -> tuple[dict[str, int], int | None]:
    """Return the extents of a KVCacheLayout by axis, and the extent of its kv dim; neither for the name of a type."""
    if not hasattr(kv_layout, "tokens_per_block"):
        return {}, None
    if getattr(kv_layout, "layer_groups", None) is not None:
        raise LayoutError("kv_layout has layer_groups: describe each group by itself, as the slice of every block's "
                          "bytes that get_group_strides() names")  # fmt: skip
    if getattr(kv_layout, "packed_kv", False):
        raise LayoutError("kv_layout has packed_kv: K and V share the content in vLLM's own order, so describe the "
                          "GPU side with backends.vllm, and the pool with KVLayout.from_tensors")  # fmt: skip
    sizes = {axis: int(getattr(kv_layout, member)) for axis, member in _SIZES.items()}
    return sizes, int(kv_layout.kv_dim) if hasattr(kv_layout, "kv_dim") else 1 if kv_layout.is_mla else 2


def _dims(shape: tuple[int, ...], order: str, sizes: dict[str, int], factor: int | None) -> tuple[str, dict[str, int]]:
    """Return the notation of one tensor, and the sizes that its shape must have."""
    axes = order.split()
    if len(shape) == 1:
        if not sizes:
            raise LayoutError(f"shape {shape} is flat; give the KVCacheLayout it was allocated by, not its type's name")
        held = " ".join(axis for axis in axes if axis != "kv" or factor == 2)
        return f"({held})", sizes
    if len(shape) == 3 and "layer" not in axes and factor != 2:  # MLA in vLLM's form: no kv dim and no head dim
        return "block token dim", {axis: size for axis, size in sizes.items() if axis != "head"}
    if len(shape) != len(axes):
        raise LayoutError(f"shape {shape} has {len(shape)} dims; expected {len(axes)}, ({', '.join(axes)})")
    kv = shape[axes.index("kv")]
    if kv not in {1, 2} or factor not in {None, kv}:
        raise LayoutError(
            f"shape {shape}: the kv dim of ({', '.join(axes)}) is {kv}; it is {factor or '2, or 1 for MLA'}"
        )
    return (order if kv == 2 else order.replace("kv", "1")), sizes
