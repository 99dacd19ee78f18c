"""Quantised caches: rows with scales inside, pages with the scales behind the data, and scales in their own tensors.

:data:`FORMATS` lists the formats; :func:`with_scales` is for scales in their own tensors. TurboQuant's rows are as in
vLLM's Triton kernels: its FlyDSL path keeps a block's scales together, and such blocks move whole (``backends.mla``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil
from typing import Any, NamedTuple

from kvplan.backends._tensors import PAGE, check_option, content_dims, dense, itemsize_of, steps_of
from kvplan.base.integers import integer, optional_integer
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
        tile: side of the square tiles (rows by bytes) in which the first region is stored; 0 if rows are plain.
    """

    fields: Mapping[str, int | tuple[float, int]]
    source: str
    regions: Mapping[str, tuple[str, ...]] = {}
    headed: bool = False
    align: int = 1
    tile: int = 0

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
    "indexer_fp8_tiled": RowFormat({"data": 128, "scale": 4}, _INDEX, _DATA_SCALE, tile=16),
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

_SHAPE = {PAGE["NHD"]: "(blocks, tokens, heads, row)", PAGE["HND"]: "(blocks, heads, tokens, row)"}


def describe(
    caches: Any,
    row_format: str,
    *,
    kv_layout: str = "NHD",
    head_dim: int = 128,
    block_tokens: int | None = None,
    num_kv_heads: int | None = None,
    layer_start: int = 0,
    head_start: int = 0,
    layers: Sequence[int] | None = None,
    part: str = "kv",
    seams: Sequence[int] = (),
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
        layer_start: global number of the first layer.
        head_start: global number of the first KV head.
        layers: global number of every layer, if they are not consecutive.
        part: name of the content, such as ``"index"``, if the format has no names.
        seams: addresses that no descriptor may cross.

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
    if row_format not in FORMATS:
        raise LayoutError(f"row_format is {row_format!r}; the known ones are {', '.join(FORMATS)}")
    order = _order(kv_layout)
    form = FORMATS[row_format]
    caches = [caches] if hasattr(caches, "shape") else caches
    if not isinstance(caches, list | tuple) or not caches or not all(hasattr(cache, "shape") for cache in caches):
        raise LayoutError("give caches as a list with one tensor a layer, in order of layers, or as one tensor")
    shape = tuple(caches[0].shape)
    for layer, cache in enumerate(caches):
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
    options: dict[str, Any] = {"layer_start": layer_start, "head_start": head_start, "layers": layers, "seams": seams}
    if not form.regions and len(shape) > 2:
        return KVLayout.from_tensors(f"layer: {dims}", caches, part=part, **options)
    pages = [_flat(cache, f"caches[{layer}]") for layer, cache in enumerate(caches)]
    sizes = form.sizes(head_dim)
    found, start = [], 0
    for name, fields in (form.regions or {"{}": tuple(sizes)}).items():
        row = sum(sizes[field] for field in fields) if form.regions else form.nbytes(head_dim)
        stop = start + tokens * heads * row
        inside, extents = (order if form.headed else "token dim"), {"token": tokens, "dim": row}
        if form.tile and not start:
            if tokens % form.tile:
                raise LayoutError(f"{tokens} rows a page; {row_format!r} comes in tiles of {form.tile} rows")
            inside = "token.0 dim.0 token.1 dim.1"
            extents = {"token.0": tokens // form.tile, "token.1": form.tile, "dim.1": form.tile}
        region = [page[:, start:stop] for page in pages]
        found.append(
            KVLayout.from_tensors(f"layer: block ({inside})", region, sizes=extents, part=name.format(part), **options)
        )
        start = stop
    return KVLayout.merge(found) if len(found) > 1 else found[0]


def with_scales(
    cache: KVLayout, scales: Mapping[str, Any], *, kv_layout: str = "NHD", whole_blocks: bool = False
) -> KVLayout:
    """Return a cache with scales, or other content, from separate tensors as further parts.

    Args:
        cache: K and V, described by the backend that reads them.
        scales: part (``"k_scale"``, ``"v_scale"``) -> one tensor per layer of the cache: ``(blocks, tokens, heads)`` or
            ``(blocks, tokens, heads, scales)`` in NHD, ``(blocks, tokens)`` if heads share a scale.
        kv_layout: ``"NHD"`` or ``"HND"``, the order of tokens and heads in the shapes of the scales.
        whole_blocks: whether a block's scales are swizzled over its tokens. Dim 0 then counts blocks, and the other
            dims are opaque. If it counts several kernel blocks for each block of the cache, these are sub-blocks.

    Raises:
        LayoutError: a wrong rank, numbers of blocks or tokens unlike the cache's, or a part that the cache has.

    >>> import numpy as np
    >>> kv = KVLayout.from_tensors("kv block token head dim", np.zeros((2, 8, 16, 4, 64), np.uint8))
    >>> k_scale, v_scale = np.zeros((2, 8, 16, 4, 8), np.uint8)
    >>> nvfp4 = with_scales(kv, {"k_scale": k_scale, "v_scale": v_scale})
    >>> nvfp4.parts, nvfp4.block_nbytes
    (('k', 'v', 'k_scale', 'v_scale'), 9216)
    """
    order = _order(kv_layout)
    found = [cache]
    for part, tensors in scales.items():
        column = [tensors] if hasattr(tensors, "shape") else tensors
        if not isinstance(column, list | tuple) or not column or not hasattr(column[0], "shape"):
            raise LayoutError(f"give scales[{part!r}] as a list with one tensor a layer, or as one tensor")
        rank = len(column[0].shape)
        axes = {4: order, 3: order.removesuffix(" dim")}.get(rank, "token")
        block, sizes = "block", {}
        if whole_blocks:
            axes = content_dims(max(rank - 1, 1))
            each, left = divmod(int(column[0].shape[0]), cache.num_blocks)
            if each > 1 and not left:
                block, sizes = "(block subblock)", {"subblock": each}
        elif rank not in {2, 3, 4}:
            raise LayoutError(f"scales[{part!r}] has shape {tuple(column[0].shape)}; it is (blocks, tokens), or with "
                              "heads, or with heads and scales; or say whole_blocks=True")  # fmt: skip
        found.append(
            KVLayout.from_tensors(
                f"layer: {block} {axes}", column, sizes=sizes, layers=cache.layers, head_start=cache.heads[0], part=part
            )
        )
    return KVLayout.merge(found)


def _order(kv_layout: str) -> str:
    check_option("kv_layout", kv_layout, PAGE)
    return PAGE[kv_layout]


def _page(shape: tuple[int, ...], form: RowFormat, order: str, told: Mapping[str, int | None]) -> tuple[str, int, int]:
    """Return the notation of one tensor, its rows per page, and its heads."""
    if len(shape) == 2:
        needed = ["block_tokens", "num_kv_heads"] if form.headed else ["block_tokens"]
        given = [told[name] for name in needed]
        tokens, heads = given[0], given[1] if form.headed else 1
        if tokens is None or heads is None:
            raise LayoutError(f"shape {shape} is pages of bytes: give {' and '.join(f'{name}=' for name in needed)}")
        return "", tokens, heads
    if form.headed and len(shape) == 4:
        dims = f"block {order}"
    elif not form.headed and len(shape) == 3:
        dims = "block token dim"
    elif not form.headed and len(shape) == 4 and 1 in shape[1:3]:
        dims = "block 1 token dim" if shape[1] == 1 else "block token 1 dim"
    else:
        expected = _SHAPE[order] if form.headed else "(blocks, tokens, row), or with one dim of 1 more"
        raise LayoutError(f"shape {shape}; rows of this format are {expected}, or pages (blocks, bytes)")
    extents = dict(zip(dims.split(), shape, strict=True))
    tokens, slots = extents["token"], extents.get("head", 1)
    heads = slots // 2 if form.headed and form.regions else slots  # NVFP4 has a slot for K and one for V
    for name, size in (("block_tokens", tokens), ("num_kv_heads", heads)):
        if told[name] not in {None, size}:
            raise LayoutError(f"{name} is {told[name]}; shape {shape} says {size}")
    return dims, tokens, heads


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
    shape, steps = tuple(cache.shape), steps_of(cache)
    if not dense(shape[1:], steps[1:], 1):
        raise LayoutError(f"{name} has shape {shape} and strides {steps}: a page is not contiguous, though its regions "
                          "stand one after the other; give the dims in the order of memory")  # fmt: skip
    return cache.reshape(shape[0], -1)
