"""Quantised caches: rows with scales inside, and pages with the scales behind the data.

:data:`FORMATS` lists the formats. Scales in tensors of their own are a layout of their own, to merge with the cache's:
``KVLayout.from_tensors("layer: block token head", scales, part="k_scale")``. TurboQuant's rows are as in vLLM's Triton
kernels: its FlyDSL path keeps a block's scales together, and such blocks move whole (``backends.mla``).
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from typing import Any, NamedTuple, Unpack

from kvplan.backends._tensors import (
    PAGE,
    Numbers,
    check_numbers,
    check_option,
    dense_inside,
    itemsize_of,
    one_per_layer,
    steps_of,
)
from kvplan.base.values import integer, optional_integer
from kvplan.errors import LayoutError
from kvplan.layout.kvlayout import KVLayout


class RowFormat(NamedTuple):
    """The bytes that are stored for one token, or for one (token, head).

    Attributes:
        fields: name of each field -> its bytes, in order; a pair is (bits for each of head_dim values, further bytes).
        source: project, version and file that define the format.
        regions: name of a part -> its fields; ``{}`` stands for the argument ``part``. A page holds each region for
            all its rows, one region after the other. Without regions, whole rows follow one another.
        headed: whether there is a row for each (token, head).
        align: bytes; the size of a page is rounded up to a multiple of them.
    """

    fields: Mapping[str, int | tuple[float, int]]
    source: str
    regions: Mapping[str, tuple[str, ...]] = {}
    headed: bool = False
    align: int = 1

    def sizes(self, head_dim: int) -> dict[str, int]:
        """Return the bytes of each field.

        >>> FORMATS["turboquant_k3v4_nc"].sizes(128)
        {'k': 48, 'k_scale': 2, 'v': 64, 'v_scale': 4}
        """
        told = {name: (0, size) if isinstance(size, int) else size for name, size in self.fields.items()}
        return {name: ceil(bits * head_dim / 8) + extra for name, (bits, extra) in told.items()}

    def nbytes(self, head_dim: int) -> int:
        """Return the bytes per row; rows of formats with heads are rounded up to an even number.

        >>> FORMATS["fp8_ds_mla"].nbytes(128), FORMATS["turboquant_3bit_nc"].nbytes(128)
        (656, 102)
        """
        total = sum(self.sizes(head_dim).values())
        return total + total % 2 if self.headed else total


_DSV4 = "SGLang 0.5.23, kernels/ops/attention/dsv4/kv_layout.py"
_FLASHMLA = "vLLM 0.33.0, v1/attention/backends/mla/flashmla_sparse.py"
_V41 = "vLLM 0.33.0, models/deepseek_v41/common/ops/cache_utils.py"
_INDEX = "SGLang 0.5.23, kernels/ops/kvcache/dsa_index_k_cache.py"
_STORE = "vLLM 0.33.0, models/deepseek_v41/common/ops/indexer_k_store.py"
_TRITON = "vLLM 0.33.0, v1/attention/backends/triton_attn.py"
_LATENT = "vLLM 0.33.0, model_executor/layers/attention/mla_attention.py"
_TURBO = "vLLM 0.33.0, model_executor/layers/quantization/turboquant/config.py"
_NVFP4 = "vLLM 0.33.0, v1/attention/backends/flashinfer.py and utils/torch_utils.py"

_DATA_SCALE = {"{}": ("data",), "{}_scale": ("scale",)}
_EACH = {"k": ("k",), "k_scale": ("k_scale",), "v": ("v",), "v_scale": ("v_scale",)}


def _pair(k: float, k_scale: int, v: float, v_scale: int) -> dict[str, int | tuple[float, int]]:
    """Return the fields of K and V, from their bits per value and the bytes of their scales."""
    return {"k": (k, 0), "k_scale": k_scale, "v": (v, 0), "v_scale": v_scale}


FORMATS: Mapping[str, RowFormat] = {
    # one row per token
    "fp8_ds_mla": RowFormat({"nope": 512, "scale": 16, "rope": 128}, _FLASHMLA),
    "nvfp4_ds_mla": RowFormat({"nope": 256, "rope": 64, "scale": 32}, _FLASHMLA),
    "deepseek_v41": RowFormat({"data": 512, "scale": 16}, _V41, align=512),
    "deepseek_v41_nvfp4": RowFormat({"data": 256, "scale": 32}, _V41, align=512),
    "int8_per_token_head_mla": RowFormat({"data": 576, "scale": 8}, _LATENT),
    "int4_per_token_head_mla": RowFormat({"data": 288, "scale": 8}, _LATENT),
    # all data of a page, then all scales
    "deepseek_v4": RowFormat(
        {"nope": 448, "rope": 128, "scale": 8}, _FLASHMLA, {"{}": ("nope", "rope"), "{}_scale": ("scale",)}, align=576
    ),
    "deepseek_v41_split": RowFormat({"data": 512, "scale": 16}, _DSV4, _DATA_SCALE, align=512),
    "deepseek_v41_nvfp4_split": RowFormat({"data": 256, "scale": 32}, _DSV4, _DATA_SCALE, align=256),
    "indexer_fp8": RowFormat({"data": 128, "scale": 4}, _INDEX, _DATA_SCALE),
    "indexer_mxfp4": RowFormat({"data": 64, "scale": 4}, _STORE, _DATA_SCALE),
    # one row per (token, head)
    "int8_per_token_head": RowFormat(_pair(8, 4, 8, 4), _TRITON, headed=True),
    "fp8_per_token_head": RowFormat(_pair(8, 4, 8, 4), _TRITON, headed=True),
    "int4_per_token_head": RowFormat(_pair(4, 4, 4, 4), _TRITON, headed=True),
    "turboquant_k8v4": RowFormat(_pair(8, 0, 4, 4), _TURBO, headed=True),
    "turboquant_4bit_nc": RowFormat(_pair(4, 2, 4, 4), _TURBO, headed=True),
    "turboquant_k3v4_nc": RowFormat(_pair(3, 2, 4, 4), _TURBO, headed=True),
    "turboquant_3bit_nc": RowFormat(_pair(3, 2, 3, 4), _TURBO, headed=True),
    # K data, K scales, V data, V scales of a page; scales have half a bit per value. For GPUs of compute capability 10,
    # vLLM swizzles V's scales within aligned groups of four tokens: groups may move, but a single token may not.
    "nvfp4": RowFormat(
        {"k": (4, 0), "k_scale": (0.5, 0), "v": (4, 0), "v_scale": (0.5, 0)}, _NVFP4, _EACH, headed=True
    ),
}


def describe(
    caches: Any,
    row_format: str,
    *,
    kv_layout: str = "NHD",
    head_dim: int = 128,
    block_tokens: int | None = None,
    num_kv_heads: int | None = None,
    **numbers: Unpack[Numbers],
) -> KVLayout:
    """Describe caches of one row format, as bytes, one tensor per layer.

    A row is opaque and moves whole: fields keep their order. If a page has separate regions, each region is a part
    (``"kv"`` and ``"kv_scale"``; ``"k"``, ``"k_scale"``, ``"v"``, ``"v_scale"``), so that tokens may move to blocks of
    another size.

    Args:
        caches: a list or tuple with one tensor per layer, in order of layers, of one-byte elements; one tensor is one
            layer. ``(blocks, tokens, row)``, also with a dim of 1 before or after the tokens; formats with
            heads ``(blocks, tokens, heads, row)`` or ``(blocks, heads, tokens, row)``, NVFP4 as vLLM's ``(blocks,
            2 * heads, tokens, row / 2)``; or pages ``(blocks, bytes)``, with the padding of their format or without.
        row_format: a name of :data:`FORMATS`.
        kv_layout: ``"NHD"`` or ``"HND"``, the order of tokens and heads in the shape, and in a page.
        head_dim: values per head, for formats with heads.
        block_tokens: rows per page, for some models a fraction of the block's tokens; needed for pages.
        num_kv_heads: heads per page; needed for pages of formats with heads.
        numbers: ``layer_start``, ``head_start``, ``layers``, ``part`` (such as ``"index"``, if the format has no
            names), ``seams``, as :meth:`kvplan.KVLayout.from_tensors` takes them.

    Raises:
        LayoutError: an unknown format or kv_layout, elements of several bytes, rows or pages whose size does not fit
            the format, or pages that are not contiguous.

    >>> import numpy as np
    >>> print(describe(np.zeros((8, 64, 656), np.uint8), "fp8_ds_mla"))
    layer: block token dim | layer=1 block=8 token=64 dim=656 | uint8 on cpu
    >>> v4 = describe(np.zeros((8, 37440), np.uint8), "deepseek_v4", block_tokens=64)
    >>> v4.parts, v4.block_nbytes
    (('kv', 'kv_scale'), 37376)
    """
    check_numbers(numbers)
    check_option("row_format", row_format, FORMATS)
    check_option("kv_layout", kv_layout, PAGE)
    form, order = FORMATS[row_format], PAGE[kv_layout]
    tensors = one_per_layer("caches", caches)
    shape = tuple(tensors[0].shape) if tensors else ()
    for layer, cache in enumerate(tensors):
        itemsize = itemsize_of(cache)
        if itemsize != 1 or tuple(cache.shape) != shape:
            raise LayoutError(f"caches[{layer}] has shape {tuple(cache.shape)} and elements of {itemsize} bytes; "
                              f"{row_format!r} is bytes (view as uint8), and caches[0] has shape {shape}")  # fmt: skip
    head_dim = integer("head_dim", head_dim, least=1)
    told = {
        "block_tokens": optional_integer("block_tokens", block_tokens),
        "num_kv_heads": optional_integer("num_kv_heads", num_kv_heads),
    }
    dims, tokens, heads = _page(shape, form, order, told)
    _check_bytes(shape, row_format, form, head_dim, tokens * heads)
    if not form.regions and len(shape) > 2:
        return KVLayout.from_tensors(f"layer: {dims}", tensors, **numbers)
    pages = [_flat(cache, f"caches[{layer}]") for layer, cache in enumerate(tensors)]
    sizes, regions, start = form.sizes(head_dim), [], 0
    for name, fields in (form.regions or {"{}": tuple(sizes)}).items():
        row = sum(sizes[field] for field in fields) if form.regions else form.nbytes(head_dim)
        stop = start + tokens * heads * row
        named = numbers | {"part": name.format(numbers.get("part", "kv"))}
        regions.append(
            KVLayout.from_tensors(
                f"layer: block ({order if form.headed else 'token dim'})", [page[:, start:stop] for page in pages],
                sizes={"token": tokens, "dim": row}, **named,
            )
        )  # fmt: skip
        start = stop
    return KVLayout.merge(regions)


def _page(shape: tuple[int, ...], form: RowFormat, order: str, told: Mapping[str, int | None]) -> tuple[str, int, int]:
    """Return the notation of one tensor, its rows per page, and its heads."""
    if len(shape) == 2:
        tokens, heads = told["block_tokens"], told["num_kv_heads"] if form.headed else 1
        if tokens is None or heads is None:
            raise LayoutError(
                f"shape {shape} is pages of bytes: give block_tokens={' and num_kv_heads=' * form.headed}"
            )
        return "", tokens, heads
    fits = ["block token dim", "block 1 token dim", "block token 1 dim"] if not form.headed else [f"block {order}"]
    for dims in fits:
        extents = dict(zip(dims.split(), shape, strict=False))
        if len(dims.split()) != len(shape) or extents.get("1", 1) != 1:
            continue
        slots = extents.get("head", 1)
        heads = slots // 2 if form.headed and form.regions else slots  # NVFP4 has a slot for K and one for V
        for name, size in (("block_tokens", extents["token"]), ("num_kv_heads", heads)):
            if told[name] not in {None, size}:
                raise LayoutError(f"{name} is {told[name]}; shape {shape} says {size}")
        return dims, extents["token"], heads
    raise LayoutError(f"shape {shape}; rows of this format are '{fits[0]}', or pages (blocks, bytes)")


def _check_bytes(shape: tuple[int, ...], name: str, form: RowFormat, head_dim: int, rows: int) -> None:
    """Raise LayoutError unless the last dim is a row of the format, or a page of ``rows`` rows."""
    row = form.nbytes(head_dim)
    fields = " + ".join(f"{field} {size}" for field, size in form.sizes(head_dim).items())
    if len(shape) > 2:
        slots = 2 if form.headed and form.regions else 1
        if shape[-1] * slots != row:
            rows_of = f"{slots} of {row // slots}" if slots > 1 else str(row)
            raise LayoutError(f"shape {shape}: rows of {shape[-1]} bytes; {name!r} has {rows_of} ({fields})")
        return
    padded = -(-rows * row // form.align) * form.align
    if shape[1] not in {rows * row, padded}:
        raise LayoutError(f"shape {shape}: pages of {shape[1]} bytes; {rows} rows of {name!r} are {rows * row} "
                          f"({fields} each), or {padded} with the padding; slice off the rest")  # fmt: skip


def _flat(cache: Any, name: str) -> Any:
    """Return a cache viewed as pages of bytes."""
    shape = tuple(cache.shape)
    if not dense_inside(cache):
        raise LayoutError(f"{name} has shape {shape} and strides {steps_of(cache)}: a page is not contiguous, though "
                          "its regions stand one after the other; give the dims in the order of memory")  # fmt: skip
    return cache.reshape(shape[0], -1)
