"""vLLM's storage orders: the addresses of pages in one raw allocation.

Source: vLLM 0.33.0, ``v1/kv_cache_layout.py`` (``KVCacheLayout``) and ``v1/kv_cache_interface.py`` (``KVCacheTensor``,
``compute_layout_strides``, ``create_kv_cache_views``). L layers, B blocks, H heads, N token slots, C bytes of content.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

from kvplan.base.integers import integer, optional_integer
from kvplan.errors import LayoutError

# Outermost axis first. HND and NHD are older names, which VLLM_KV_CACHE_LAYOUT still accepts.
ORDERS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
ALIASES = {"HND": "LBHNC", "NHD": "LBNHC"}


def strides_of(order: str, extents: Mapping[str, int], fixed: Mapping[str, int], page_nbytes: int) -> dict[str, int]:
    """Return the stride of each axis in bytes.

    Args:
        order: the five axes, outermost first.
        extents: extents of the axes L, B, H, N and C; C in bytes.
        fixed: strides of L and B in bytes, if they are known.
        page_nbytes: least bytes per page.

    >>> sizes = {"L": 2, "B": 10, "H": 4, "N": 16, "C": 256}
    >>> strides_of("LBHNC", sizes, {}, 16384)
    {'C': 1, 'N': 256, 'H': 4096, 'B': 16384, 'L': 163840}
    >>> strides_of("LHBNC", sizes, {}, 16384)["H"]
    40960
    """
    strides: dict[str, int] = {}
    step = 1
    for axis in reversed(order):
        if axis in "LB" and _is_page(order, axis, extents):
            step = max(step, page_nbytes)
        strides[axis] = fixed.get(axis, step)
        step = strides[axis] * extents[axis]
    return strides


def _is_page(order: str, axis: str, extents: Mapping[str, int]) -> bool:
    """Return whether all axes inside a block (H, N, C) are to the right of ``axis``; extents of 1 do not count."""
    return prod(extents[other] for other in order[: order.index(axis)] if other not in "LB") == 1


def place(
    raw: Any,
    *,
    layers: int,
    blocks: int,
    heads: int,
    tokens: int,
    row_nbytes: int,
    order: str = "LBHNC",
    offset: int = 0,
    layer_stride: int | None = None,
    block_stride: int | None = None,
    page_nbytes: int | None = None,
    kernel_tokens: int | None = None,
) -> list[Any]:
    """Return views of the layers that share a raw allocation, each ``(blocks, heads, tokens, row_nbytes)``.

    The page of layer ``l`` and block ``b`` begins at byte ``offset + l * layer_stride + b * block_stride`` of ``raw``.
    Pass the views to ``describe``. For groups that share memory, call this once per group with the same ``raw``.

    Args:
        raw: one dimension of int8 or uint8, contiguous: the whole allocation.
        layers: number of layers in ``raw``, ``len(KVCacheTensor.layers)``.
        blocks: number of the manager's blocks, ``KVCacheConfig.num_blocks``.
        heads: KV heads, or head slots (``spec.num_heads``); 1 for an MLA latent.
        tokens: token slots per block of the manager (``spec.num_states``).
        row_nbytes: bytes of content per (head, token), K and V together (``spec.state_content_size_bytes``).
        order: ``"LBHNC"`` (or ``"HND"``), ``"LBNHC"`` (or ``"NHD"``), ``"LHBNC"``, ``"BLHNC"``, ``"BLNHC"`` or
            ``"BHLNC"``.
        offset: bytes to block 0 of the first layer.
        layer_stride: bytes from a layer to the next; by default as densely as the order allows.
        block_stride: bytes from a block to the next; by default as densely as the order allows.
        page_nbytes: bytes of a padded page, ``spec.page_size_padded``; the padding is not content.
        kernel_tokens: token slots per block of the attention kernel, if that block is smaller. The views then have
            ``tokens // kernel_tokens`` blocks for each block of the manager.

    Raises:
        LayoutError: the order is unknown, the memory has a wrong form, a size is not a positive integer, a page is
            smaller than its content or in an order without pages, split pages have gaps, or layers leave the
            allocation.

    >>> import numpy as np
    >>> raw = np.zeros(2 * 10 * 16384, np.int8)
    >>> first, second = place(raw, layers=2, blocks=10, heads=4, tokens=16, row_nbytes=256, order="BLNHC")
    >>> first.shape, first.strides, second.ctypes.data - first.ctypes.data
    ((10, 4, 16, 256), (32768, 256, 1024, 1), 16384)
    """
    order = ALIASES.get(order, order)
    if order not in ORDERS:
        raise LayoutError(f"order is {order!r}; vLLM's are {', '.join(ORDERS)}, and HND and NHD for the first two")
    nbytes = _raw_nbytes(raw)
    layers, blocks = integer("layers", layers, least=1), integer("blocks", blocks, least=1)
    heads, tokens = integer("heads", heads, least=1), integer("tokens", tokens, least=1)
    row_nbytes, offset = integer("row_nbytes", row_nbytes, least=1), integer("offset", offset)
    layer_stride = optional_integer("layer_stride", layer_stride, least=1)
    block_stride = optional_integer("block_stride", block_stride, least=1)
    page_nbytes = optional_integer("page_nbytes", page_nbytes, least=1)
    kernel_tokens = optional_integer("kernel_tokens", kernel_tokens, least=1)
    extents = {"L": layers, "B": blocks, "H": heads, "N": tokens, "C": row_nbytes}
    page = heads * tokens * row_nbytes
    if page_nbytes is not None:
        if page_nbytes < page:
            raise LayoutError(f"page_nbytes is {page_nbytes}; a page holds {heads} x {tokens} x {row_nbytes} = {page}")
        if not _is_page(order, "L", extents) or not _is_page(order, "B", extents):
            raise LayoutError(f"page_nbytes is given for {order}, which stores no page in one piece; only orders that "
                              "begin with LB or BL pad pages")  # fmt: skip
    given = {"L": layer_stride, "B": block_stride}
    fixed = {axis: stride for axis, stride in given.items() if stride is not None}
    strides = strides_of(order, extents, fixed, page_nbytes or page)
    if kernel_tokens is not None and kernel_tokens != tokens:
        extents, strides = _kernel_blocks(order, extents, strides, kernel_tokens)
    reach = offset + sum((extents[axis] - 1) * strides[axis] for axis in order) + 1
    if offset < 0 or reach > nbytes:
        raise LayoutError(f"{layers} layers of {blocks} blocks in {order} from byte {offset} reach byte {reach}; the "
                          f"allocation has {nbytes}")  # fmt: skip
    shape = tuple(extents[axis] for axis in "BHNC")
    steps = tuple(strides[axis] for axis in "BHNC")
    return [_view(raw, offset + layer * strides["L"], shape, steps) for layer in range(layers)]


def _kernel_blocks(
    order: str, extents: dict[str, int], strides: dict[str, int], kernel_tokens: int
) -> tuple[dict[str, int], dict[str, int]]:
    """Divide each page into several blocks of the kernel, each in the order of a page."""
    tokens, page = extents["N"], extents["H"] * extents["N"] * extents["C"]
    ratio, rest = divmod(tokens, kernel_tokens)
    if rest:
        raise LayoutError(f"kernel_tokens is {kernel_tokens}; it divides the {tokens} of a manager's block")
    if strides["B"] != page:
        raise LayoutError(f"blocks of {order} are {strides['B']} bytes apart and hold {page}; only dense pages, one "
                          "after the other, are split into kernel blocks")  # fmt: skip
    extents = extents | {"B": extents["B"] * ratio, "N": kernel_tokens}
    fixed = {"L": strides["L"], "B": page // ratio}
    return extents, strides_of(order, extents, fixed, page // ratio)


def _raw_nbytes(raw: Any) -> int:
    shape = tuple(raw.shape) if hasattr(raw, "shape") else None
    itemsize = raw.element_size() if hasattr(raw, "element_size") else getattr(raw, "itemsize", 0)
    if shape is None or len(shape) != 1 or itemsize != 1 or shape[0] < 1:
        what = type(raw).__name__ if shape is None else f"of shape {shape} and {itemsize} bytes an element"
        raise LayoutError(f"raw is {what}; give the allocation as one dimension of int8")
    steps = raw.stride() if callable(getattr(raw, "stride", None)) else raw.strides
    if shape[0] > 1 and steps[0] != 1:
        raise LayoutError(f"raw has a stride of {steps[0]}; give the allocation itself, every byte of it")
    return int(shape[0])


def _view(raw: Any, start: int, shape: tuple[int, ...], steps: tuple[int, ...]) -> Any:
    if hasattr(raw, "as_strided"):
        return raw.as_strided(shape, steps, raw.storage_offset() + start)
    from numpy.lib.stride_tricks import as_strided

    return as_strided(raw[start:], shape, steps)
