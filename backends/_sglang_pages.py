"""SGLang's pools without flat token slots: DeepSeek-V4's pages, and the states of recurrent layers.

Source: SGLang 0.5.23, ``srt/mem_cache/deepseek_v4_memory_pool.py`` (``DeepSeekV4SingleKVPool``,
``DeepSeekV4UniformFP8KVPool``, ``DeepSeekV4IndexerPool``), ``kernels/ops/attention/dsv4/kv_layout.py``
(``KVLayout.row_addressing``), ``memory_pool.py`` (``MambaPool``), ``pool_host/mamba.py`` (``MambaPoolHost``) and
``memory_pool_host.py`` (``DeepSeekV4PagedHostPool``, ``DeepSeekV4StateHostPool``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from kvplan.backends._tensors import content_dims
from kvplan.errors import LayoutError

# A host pool's layout -> the dims of its page rows; a list has one tensor per layer.
PAGE_ROWS = {
    "layer_first": "layer: block dim",
    "page_first": "block layer dim",
    "page_first_direct": "block layer 1 dim",
}


class Part(NamedTuple):
    """A part of a pool that one notation describes."""

    part: str
    notation: str
    tensors: Any
    sizes: dict[str, int]


def parts_of(pool: Any, kind: str) -> list[Part] | None:
    """Return the parts of a pool of pages or of states; None for any other pool.

    Raises:
        LayoutError: one strided map cannot describe the pool; the message gives the reason and an alternative.
    """
    if hasattr(pool, "mamba_cache"):
        return _states(pool.mamba_cache.temporal, pool.mamba_cache.conv, "layer block", _siblings(pool), kind)
    if hasattr(pool, "temporal_buffer"):
        dims = "block layer 1" if str(pool.layout).startswith("page_first") else "layer block"
        return _states(pool.temporal_buffer, pool.conv_buffer, dims, len(pool.slot_state_buffers), kind)
    if hasattr(pool, "kv_buffer_rope"):
        raise LayoutError(
            f"{kind} keeps a ring of slots for each request before its compressed rows, so that rows have no pages; "
            "describe those from pool.swa_pages on, 'layer: (block token) dim'"
        )
    if hasattr(pool, "bytes_per_page_padded"):
        return _latents(pool, kind)
    if hasattr(pool, "index_k_payload_buffer"):
        raise LayoutError(f"{kind} keeps FP4 keys and their scales in two buffers: describe index_k_payload_buffer, "
                          "viewed as uint8, as 'layer: block 1 dim.0 token dim.1' and index_k_scale_buffer as 'layer: "
                          "block 1 dim token', each with a part of its own, and merge")  # fmt: skip
    if hasattr(pool, "index_head_dim") and not hasattr(pool, "kv_buffer") and not hasattr(pool, "layout"):
        return [Part("index", "layer: block dim", pool.index_k_with_scale_buffer, {})]
    if hasattr(pool, "item_bytes") or hasattr(pool, "state_page_bytes"):
        rows = PAGE_ROWS.get(pool.layout, "block layer dim")
        raise LayoutError(f"{kind} keeps page rows of bytes and does not tell their inner order: describe "
                          f"both sides as whole pages, KVLayout.from_tensors({rows!r}, pool.kv_buffer) here and "
                          "'layer: block dim' of the device's buffers, viewed as uint8")  # fmt: skip
    return None


def _latents(pool: Any, kind: str) -> list[Part]:
    """Describe pages of latents: either rows that hold their scales, or all data of a page, then all scales."""
    page, row, form = int(pool.page_size), int(pool.kv_cache_total_dim), pool.kv_layout
    sizes, buffers = {"token": page}, pool.kv_buffer
    if form.bytes_per_token != row or not form.scale_bytes or form.is_interleaved:  # plain values: row after row
        return [Part("kv", "layer: block (token dim)", [pages[:, : page * row] for pages in buffers], sizes)]
    data, scales = int(form.data_bytes), int(form.scale_bytes)
    step, start, scale_step = form.row_addressing(page)
    if (step, start, scale_step) != (data, page * data, scales):
        raise LayoutError(f"{kind} has rows of {step} bytes, and scales from byte {start} on, {scale_step} bytes each; "
                          "SGLang 0.5.23 has all data and then all scales, without gaps")  # fmt: skip
    return [
        Part("kv", "layer: block (token dim)", [pages[:, :start] for pages in buffers], sizes),
        Part("kv_scale", "layer: block (token dim)",
             [pages[:, start : start + page * scales] for pages in buffers], sizes),
    ]  # fmt: skip


def _siblings(pool: Any) -> int:
    return len(getattr(pool, "_slot_siblings", ()))


def _states(temporal: Any, conv: Sequence[Any], dims: str, beside: int, kind: str) -> list[Part]:
    """Describe the recurrent state ``"ssm"`` and the convolutions ``"conv"``, ``"conv_1"``, ...; a slot is a block."""
    if beside:
        raise LayoutError(f"{kind} keeps {beside} kinds of side state that belong to no layer: describe each with "
                          "KVLayout.from_tensors('block dim', ...), flattened to (slots, elements), with a part of its "
                          "own, and merge them with backends.state of the rest")  # fmt: skip
    named = [(f"conv_{k}" if k else "conv", tensor) for k, tensor in enumerate(conv)]
    return [
        Part(part, f"{dims} {content_dims(len(tensor.shape) - len(dims.split()))}", tensor, {})
        for part, tensor in (*named, ("ssm", temporal))
        if 0 not in tuple(tensor.shape)  # a model of convolutions alone has a state of no elements
    ]
