"""MLA: one latent row per token for all heads, plain, packed with its scales, or split into ckv and kpe.

Source: vLLM 0.10.2, ``v1/attention/backends/mla/common.py``, for ``(num_blocks, block_tokens, 576)``; vLLM 0.33.0,
``mla/flashmla_sparse.py`` and ``ops/rocm_aiter_mla_sparse.py``, for the packed rows; SGLang 0.5.23,
``memory_pool.py`` (``MLATokenToKVPool``) and ``deepseek_v4_memory_pool.py``; FlashInfer 0.7.2, ``mla/_core.py`` and
``mla/_batch_mla``.

=====================  ============================  ==============================================
row                    bytes per token               a block of several tokens
=====================  ============================  ==============================================
bf16, fp8              1152, 576 (512 + 64 values)   row after row
fp8_ds_mla             656 = 512 + 16 + 128          row after row
nvfp4_ds_mla           352 = 256 + 64 + 32           row after row
DeepSeek-V4.1          528 = 512 + 16                row after row
DeepSeek-V4            584 = 448 + 128 + 8           all data, then all scales: ``whole_blocks=True``
DeepSeek-V3.2 indexer  132 = 128 + 4                 all data, then all scales: ``whole_blocks=True``
=====================  ============================  ==============================================
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvplan.backends._tensors import itemsize_of, one_per_layer
from kvplan.base.values import optional_integer
from kvplan.errors import LayoutError
from kvplan.layout.kvlayout import KVLayout


def describe(
    kv_caches: Any,
    *,
    kpe: Any = None,
    layer_start: int = 0,
    layers: Sequence[int] | None = None,
    part: str = "kv",
    block_tokens: int | None = None,
    row_nbytes: int | None = None,
    whole_blocks: bool = False,
    seams: Sequence[int] = (),
) -> KVLayout:
    """Describe latent caches, one tensor per layer. Packed rows are opaque bytes.

    Real strides are used, so blocks and rows may be padded. Padding is not moved.

    Args:
        kv_caches: a list or tuple with one tensor per layer, in order; a single tensor is one layer. Each is
            ``(num_blocks, block_tokens, dim)``, ``(num_blocks, 1, block_tokens, dim)`` or ``(num_blocks,
            block_tokens, 1, dim)``; with ``block_tokens=``, flat slots ``(num_blocks * block_tokens, 1, dim)`` or
            ``(num_blocks * block_tokens, dim)``; with ``whole_blocks=True`` also ``(num_blocks, bytes of a block)``.
        kpe: the RoPE half of a split cache, in the same form; the parts are then ``"ckv"`` and ``"kpe"``.
        layer_start: global number of the first layer.
        layers: global number of every layer, if they are not consecutive.
        part: name of the content: ``"kv"``, or the name of an extra, such as ``"index"``.
        block_tokens: token slots per block, if dim 0 holds flat slots.
        row_nbytes: bytes of content at the start of the last dim, if padding follows there.
        whole_blocks: whether the bytes of one token are not contiguous (see the table above). Blocks then move whole,
            and only to blocks with the same number of tokens.
        seams: addresses that no descriptor may cross.

    Raises:
        LayoutError: a wrong rank or extent, a 4-D shape in which two dims could be the head dim, row_nbytes that do
            not fit a row, or kpe together with part, row_nbytes or seams.

    >>> import numpy as np
    >>> print(describe([np.zeros((8, 64, 656), np.uint8) for layer in range(2)]))
    layer: block token dim | layer=2 block=8 token=64 dim=656 | uint8 on cpu
    >>> describe(np.zeros((512, 1, 576), np.float16), block_tokens=64).notation
    'layer: (block token) 1 dim'
    >>> split = describe(np.zeros((8, 64, 512), np.float16), kpe=np.zeros((8, 64, 64), np.float16))
    >>> split.parts, split.block_nbytes
    (('ckv', 'kpe'), 73728)
    """
    if kpe is not None:
        if part != "kv" or row_nbytes is not None or len(seams):
            raise LayoutError(
                "kpe= names the parts 'ckv' and 'kpe' and takes no part, row_nbytes or seams; for those, describe each "
                "of the two by itself, with part='ckv' and part='kpe', and merge"
            )
        return KVLayout.merge([
            describe(half, layer_start=layer_start, layers=layers, part=name, block_tokens=block_tokens,
                     whole_blocks=whole_blocks)
            for name, half in (("ckv", kv_caches), ("kpe", kpe))
        ])  # fmt: skip
    caches = one_per_layer("kv_caches", kv_caches)
    row_nbytes = optional_integer("row_nbytes", row_nbytes)
    if row_nbytes is not None:
        caches = [_without_padding(cache, row_nbytes) for cache in caches]
    # Whole blocks have no token axis: their tokens count as content.
    token, dim = ("dim.0", "dim.1") if whole_blocks else ("token", "dim")
    axes = ["block", token, dim] if block_tokens is None else [f"(block {token})", dim]
    if caches:
        axes = _with_one(tuple(caches[0].shape), axes, whole_blocks=whole_blocks)
    sizes = None if block_tokens is None else {token: block_tokens}
    return KVLayout.from_tensors(
        f"layer: {' '.join(axes)}", caches, sizes=sizes, layer_start=layer_start, layers=layers, part=part, seams=seams
    )


def _with_one(shape: tuple[int, ...], axes: list[str], *, whole_blocks: bool) -> list[str]:
    """Return the axes of a shape, in which the one head may have a dim of its own."""
    ones = [at for at in range(1, len(shape) - 1) if shape[at] == 1]
    if len(shape) == len(axes):
        return axes
    if len(shape) == len(axes) + 1 and len(ones) == 1:
        return [*axes[: ones[0]], "1", *axes[ones[0] :]]
    if len(shape) == 2 and whole_blocks:
        return ["block", "dim"]
    raise LayoutError(
        f"shape {shape}: an MLA cache has one head, and is (num_blocks, block_tokens, dim), with or without a dim of 1 "
        "before or after the tokens; flat slots, with block_tokens=, are (slots, dim) or (slots, 1, dim); rows that "
        "are whole blocks, with whole_blocks=True, (num_blocks, bytes)"
    )


def _without_padding(cache: Any, row_nbytes: int) -> Any:
    itemsize = itemsize_of(cache)
    row = int(cache.shape[-1]) * itemsize
    if not 0 < row_nbytes <= row or row_nbytes % itemsize:
        raise LayoutError(f"row_nbytes is {row_nbytes}; rows have {row} bytes, in elements of {itemsize}")
    return cache[..., : row_nbytes // itemsize]
