"""SGLang: device pools of flat token slots, and HiCache's host pools in each of their layouts.

Source: SGLang 0.5.23, ``srt/mem_cache/memory_pool.py`` (``MHATokenToKVPool``, ``MLATokenToKVPool`` and their FP4, MXFP8
and DSA kinds), ``unified_memory_pool.py``, ``pool_host/mha.py``, ``mla.py``, ``dsa.py``, ``mha_mxfp8.py`` and
``page_unified.py``; registrations in ``pool_host/common.py``. Its pages are kvplan's blocks. For pools without flat
slots: ``deepseek_v4_memory_pool.py`` (``DeepSeekV4SingleKVPool``, ``DeepSeekV4UniformFP8KVPool``,
``DeepSeekV4IndexerPool``), ``kernels/ops/attention/dsv4/kv_layout.py`` (``KVLayout.row_addressing``),
``memory_pool.py`` (``MambaPool``), ``pool_host/mamba.py`` and ``memory_pool_host.py`` (``DeepSeekV4PagedHostPool``,
``DeepSeekV4StateHostPool``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from kvplan.backends._tensors import check_option, content_dims
from kvplan.base.integers import integer, integers, optional_integer
from kvplan.errors import LayoutError
from kvplan.layout.kvlayout import KVLayout

# The dims of one layer with flat slots: of K or of V, and of a latent.
SLOTS = "(block token) head dim"
LATENT = "(block token) 1 dim"

# A device pool's kv_cache_layout -> the dims of one layer's K, and of its V.
DEVICE = {
    "nhd": (SLOTS, SLOTS),
    "page_major": (SLOTS, SLOTS),  # the unified pool: a slot holds all layers, so rows are strided
    "hnd": ("block head token dim", "block head token dim"),
    "vectorized_5d": ("block head dim.0 token dim.1", "block head token.0 dim token.1"),
}

# Content of one buffer of a host pool -> the pool's layout -> the dims. head.0 counts head groups.
HOST = {
    "K and V": {
        "layer_first": f"kv layer {SLOTS}",
        "page_first": "kv (block token) layer head dim",
        "page_first_direct": "kv block layer token head dim",
        "page_head": "kv block head token layer dim",
        "page_unified": "block head.0 layer kv token head.1 dim",
    },
    "MLA": {
        "layer_first": f"layer {LATENT}",
        "page_first": "(block token) layer 1 dim",
        "page_first_direct": "block layer token 1 dim",
        "page_unified": "block layer token dim",
    },
    "K or V alone": {
        "layer_first": f"layer {SLOTS}",
        "page_first": "(block token) layer head dim",
        "page_first_direct": "block layer token head dim",
    },
}

# The scales of MXFP8 in pages of 128 tokens: token t lies at (t % 32, t // 32).
MXFP8 = "head token.1 token.0 dim"

# Names of the inner pools of SWA, hybrid linear attention, MiniMax, HiCache's HostPoolGroup and DeepSeek-V4.
_INNER = (
    "full_kv_pool", "swa_kv_pool", "main_pool", "dense_pool", "index_kv_pool", "index_k_pool", "entries", "kv_pools",
    "index_pools", "unified_kv_pool",
)  # fmt: skip


class _Naming(NamedTuple):
    """Global numbers of layers and heads in a pool, and the seams of its memory."""

    layers: tuple[int, ...] | None
    layer_start: int
    head_start: int
    seams: tuple[int, ...]

    def of(self, notation: str, tensors: Any, part: str = "kv", sizes: Mapping[str, int] | None = None) -> KVLayout:
        """Describe tensors with these numbers."""
        return KVLayout.from_tensors(notation, tensors, sizes=sizes, part=part, **self._asdict())


def describe(
    pool: Any,
    *,
    layout: str | None = None,
    page_size: int | None = None,
    layer_start: int | None = None,
    head_start: int = 0,
    layers: Sequence[int] | None = None,
    seams: Sequence[int] = (),
) -> KVLayout:
    """Describe a pool of SGLang, or tensors laid out as one; slots after the last whole page are left out.

    Block ids are physical page numbers: slot // page_size. Page 0 of a device pool receives the writes of padding and
    is never allocated; host pools allocate every page. Scales are parts ``"k_scale"`` and ``"v_scale"`` (``"kv_scale"``
    for MLA), native FP4 scales ``"k_native_scale"`` and ``"v_native_scale"``, index keys ``"index"``. A page of index
    keys is opaque; several are sub-blocks of a larger block of a pool (``"block layer subblock dim"``). In single pools
    of DeepSeek-V4, a token is a compressed token. States of recurrent layers are parts ``"conv"`` and ``"ssm"``, and a
    block is a state slot.

    Args:
        pool: the engine's pool: a device pool (``k_buffer`` and ``v_buffer``, or ``kv_buffer``, lists with one tensor
            per layer) or a host pool (``layout`` and ``kv_buffer``). Or tensors: K and V as a pair of lists, with one
            tensor ``(slots, heads, head_dim)`` per layer; a list of latents ``(slots, 1, dim)``; or a host buffer with
            its dims in the engine's order, K and V outermost if it is not MLA.
        layout: layout of tensors: ``"nhd"`` (default), ``"hnd"`` or ``"vectorized_5d"`` on a device; ``"layer_first"``,
            ``"page_first"``, ``"page_first_direct"``, ``"page_head"`` or ``"page_unified"`` on a host.
        page_size: tokens per page, for tensors.
        layer_start: global number of the first layer; by default the pool's own number, or 0.
        head_start: global number of this rank's first KV head; pools do not know it.
        layers: global number of every layer in the pool, if they are not consecutive. A host pool counts from its
            start_layer, its draft layers last. If the device pool has ``model_layer_ids`` (``mamba_layer_ids``) that
            differ, give these.
        seams: addresses that no descriptor may cross, for tensors; a host pool knows where its registrations meet.

    Raises:
        LayoutError: a pool of pools, an unknown kind of pool, a pool together with layout, page_size or seams, tensors
            without page_size, or shapes that do not fit the layout.

    >>> import numpy as np
    >>> k_buffer, v_buffer = ([np.zeros((256 + 64, 8, 128), np.float16) for layer in range(2)] for _ in "kv")
    >>> print(describe((k_buffer, v_buffer), page_size=64))
    kv layer: (block token) head dim | layer=2 kv=2 block=5 token=64 head=8 dim=128 | float16 on cpu
    >>> print(describe(np.zeros((2, 320, 2, 8, 128), np.float16), layout="page_first", page_size=64, layer_start=40))
    kv (block token) layer head dim | layer=2 kv=2 block=5 token=64 head=8 dim=128 | float16 on cpu | layers 40-41
    """
    numbers = None if layers is None else integers("layers", layers, least=0)
    first = optional_integer("layer_start", layer_start, least=0) or 0
    naming = _Naming(numbers, first, head_start, integers("seams", seams))
    page_size = optional_integer("page_size", page_size, least=1)
    if isinstance(pool, list | tuple) or hasattr(pool, "shape"):
        return _tensors(pool, layout, page_size, naming)
    kind = type(pool).__name__
    if layout is not None or page_size is not None or len(seams):
        raise LayoutError(f"a pool ({kind}) has its own layout, page_size and seams; leave them out")
    _refuse_pools(pool, kind)
    pages = parts_of(pool, kind)
    if pages is None:
        _refuse(pool, kind)
    if layers is None and layer_start is None:
        given = getattr(pool, "model_layer_ids", getattr(pool, "mamba_layer_ids", ()))
        numbers = integers("model_layer_ids", given, least=0)
        first = integer("start_layer", getattr(pool, "start_layer", 0), least=0)
        naming = naming._replace(layers=numbers or None, layer_start=first)
    if pages is not None:
        return KVLayout.merge([
            _seamed(naming, tensors).of(notation, tensors, part, sizes) for notation, tensors, part, sizes in pages
        ])  # fmt: skip
    if hasattr(pool, "layout"):
        return _host_pool(pool, kind, naming)
    return _device_pool(pool, kind, naming)


def _refuse_pools(pool: Any, kind: str) -> None:
    """Raise LayoutError if a pool consists of several pools: each of these has its own page ids."""
    inner = [name for name in _INNER if _has(pool, name)]
    if inner:
        raise LayoutError(f"{kind} is a pool of pools, each with page ids of its own; describe what "
                          f"{', '.join(inner)} hold{'s' if len(inner) == 1 else ''}, one by one")  # fmt: skip


def _refuse(pool: Any, kind: str) -> None:
    """Raise LayoutError with the reason if this module does not describe a pool."""
    if getattr(pool, "kpool_use_compress", False):
        raise LayoutError(f"{kind} keeps compress tails a request, not a page; run without index_kpool_compress")
    host = hasattr(pool, "layout")
    whole = [name for name in ("k_buffer", "kv_buffer") if hasattr(getattr(pool, name, None), "shape")]
    if pool.layout == "page_first_kv_split" if host else whole:
        raise LayoutError(f"{kind} is a pool of Ascend, where each of its buffers is one tensor; describe each with "
                          "backends.cross_layer, and merge")  # fmt: skip
    packed = not any(hasattr(pool, name) for name in ("head_num", "kv_lora_rank", "index_k_with_scale_buffer"))
    if host and (packed or getattr(pool, "stores_page_envelope", False)):
        raise LayoutError(f"{kind} keeps packed page rows of an unknown inner order: describe its "
                          "buffer as whole blocks, KVLayout.from_tensors('block dim', ...), on both sides")  # fmt: skip


def _has(pool: Any, name: str) -> bool:
    return getattr(pool, name, None) is not None


def _member(pool: Any, kind: str, name: str) -> Any:
    if not _has(pool, name):
        raise LayoutError(f"{kind} has no {name!r}; give a device or host pool of SGLang 0.5.23, or tensors with "
                          "layout= and page_size=")  # fmt: skip
    return getattr(pool, name)


def _device_pool(pool: Any, kind: str, naming: _Naming) -> KVLayout:
    page = integer("page_size", _member(pool, kind, "page_size"), least=1)
    # If memory was allocated after the capture of graphs, only the slots up to the pool's size have memory.
    slots = integer("size", _member(pool, kind, "size")) + page if getattr(pool, "post_capture_active", False) else None
    if _has(pool, "k_buffer"):
        if not _has(pool, "v_buffer"):  # MiniMax's index branch reads no V
            return naming.of(f"layer: {SLOTS}", _whole_pages(pool.k_buffer, page, slots), "index", {"token": page})
        form = getattr(pool, "kv_cache_layout", "nhd")
        kv = _keys_and_values(pool.k_buffer, pool.v_buffer, form, page, naming, slots)
        return KVLayout.merge([kv, *_scales(pool, page, naming, slots)])
    latents = _member(pool, kind, "kv_buffer")
    held, rows = _held(latents, naming)
    parts = [held.of(f"layer: {LATENT}", _whole_pages(rows, page, slots), sizes={"token": page})]
    if _has(pool, "kv_scale_buffer"):
        rows = _whole_pages(pool.kv_scale_buffer, page, slots)
        parts.append(naming.of("layer: (block token) dim", rows, "kv_scale", {"token": page}))
    index = getattr(pool, "index_k_with_scale_buffer", None) or ()
    if any(len(pages) for pages in index):  # all keys of a page, then all scales; empty if layers share their top-k
        held, rows = _held(index, naming)
        count, blocks = len(rows[0]), parts[0].num_blocks
        if not blocks <= count <= blocks + 1:
            raise LayoutError(f"{kind} has {count} pages of index keys and {blocks} of latents, so that their ids "
                              "differ (decode context parallelism); describe kv_buffer by itself")  # fmt: skip
        parts.append(held.of("layer: block dim", [pages[:blocks] for pages in rows], "index"))
    return KVLayout.merge(parts)


def _keys_and_values(k: Any, v: Any, form: str, page: int, naming: _Naming, slots: int | None = None) -> KVLayout:
    check_option("kv_cache_layout", form, DEVICE)
    flat = DEVICE[form][0] == SLOTS
    halves = [_whole_pages(half, page, slots, page_rows=not flat) for half in (k, v)]
    (k_dims, v_dims), sizes = DEVICE[form], {"token": page}
    if k_dims == v_dims and [tuple(t.shape) for t in halves[0]] == [tuple(t.shape) for t in halves[1]]:
        return naming.of(f"kv layer: {k_dims}", halves, sizes=sizes)
    # K and V of different orders, or of different widths, are two layouts.
    return KVLayout.merge([
        naming.of(f"layer: {dims}", half, part, sizes)
        for half, dims, part in zip(halves, DEVICE[form], "kv", strict=True)
    ])  # fmt: skip


def _scales(pool: Any, page: int, naming: _Naming, slots: int | None) -> list[KVLayout]:
    """Describe scales of K and of V: one per 16 values (FP4) or 32 (MXFP8), and FP4's in the order of its kernels."""
    found: list[KVLayout] = []
    for half in "kv":
        if _has(pool, f"{half}_scale_buffer"):
            scales, part, sizes = getattr(pool, f"{half}_scale_buffer"), f"{half}_scale", {"token": page}
            if len(scales[0].shape) == 5:
                found.append(naming.of(f"layer: block {MXFP8}", scales, part, sizes))
            elif len(scales[0].shape) == 3:
                found.append(naming.of(f"layer: {SLOTS}", _whole_pages(scales, page, slots), part, sizes))
            else:
                rows, sizes = _whole_pages(scales, page, slots), sizes | {"head": int(pool.head_num)}
                found.append(naming.of("layer: (block token) (head dim)", rows, part, sizes))
        if _has(pool, f"native_{half}_scale_buffer"):  # the kernel decides the order inside a page, which moves whole
            native = getattr(pool, f"native_{half}_scale_buffer")
            found.append(naming.of("layer: block head dim.0 dim.1", native, f"{half}_native_scale"))
    return found


def _held(buffers: Any, naming: _Naming) -> tuple[_Naming, list[Any]]:
    """Return the layers that have rows on this rank; the tensors of other layers have no rows."""
    rows = [rows for rows in buffers if len(rows)]
    if len(rows) == len(buffers):
        return naming, rows
    numbers = naming.layers or tuple(range(naming.layer_start, naming.layer_start + len(buffers)))
    if len(numbers) != len(buffers):
        raise LayoutError(f"layers are {numbers}; the pool has {len(buffers)}, those without rows counted")
    kept = tuple(number for number, rows in zip(numbers, buffers, strict=True) if len(rows))
    return naming._replace(layers=kept), rows


def _whole_pages(tensors: Any, page: int, slots: int | None = None, *, page_rows: bool = False) -> list[Any]:
    """Return tensors cut to the whole pages that have memory. A row is a slot, or a page."""
    step, limit = (1, page) if page_rows else (page, 1)
    counts = [len(t) if slots is None else min(len(t), slots // limit) for t in tensors]
    return [t[: count // step * step] for t, count in zip(tensors, counts, strict=True)]


def _host_pool(pool: Any, kind: str, naming: _Naming) -> KVLayout:
    page, layout = integer("page_size", _member(pool, kind, "page_size"), least=1), pool.layout
    if _has(pool, "index_k_with_scale_buffer"):
        buffer, count = pool.index_k_with_scale_buffer, _member(pool, kind, "page_num")  # its last page has no id
        if layout == "layer_first":
            return _seamed(naming, buffer).of("layer block dim", buffer[:, :count], "index")
        return _seamed(naming, buffer).of("block layer 1 dim", buffer[:count], "index")
    if not _has(pool, "kv_buffer"):
        if not _has(pool, "k_buffer"):
            raise LayoutError(f"{kind} has no kv_buffer: it only allocates, or was destroyed")
        return _host_buffer(pool.k_buffer, "K or V alone", layout, page, naming, "index")
    if isinstance(pool.kv_buffer, list | tuple):  # V of another width than K
        return KVLayout.merge([
            _host_buffer(half, "K or V alone", layout, page, naming, part)
            for half, part in zip(pool.kv_buffer, "kv", strict=True)
        ])  # fmt: skip
    what = "MLA" if _has(pool, "kv_lora_rank") else "K and V"
    parts = [_host_buffer(pool.kv_buffer, what, layout, page, naming)]
    for half in "kv":
        if _has(pool, f"{half}_scale_host"):
            scales, sizes = getattr(pool, f"{half}_scale_host"), {"token.1": 32, "token.0": page // 32}
            sizes["head"] = int(pool.head_num)
            parts.append(_seamed(naming, scales).of(f"block layer ({MXFP8})", scales, f"{half}_scale", sizes))
    return KVLayout.merge(parts)


def _host_buffer(buffer: Any, what: str, layout: str, page: int, naming: _Naming, part: str = "kv") -> KVLayout:
    check_option(f"layout, of {what},", layout, HOST[what])
    return _seamed(naming, buffer).of(HOST[what][layout], buffer, part, {"token": page})


def _seamed(naming: _Naming, buffer: Any) -> _Naming:
    """Add the borders between the registrations of a large buffer, as the engine notes them on the tensor."""
    ranges = getattr(buffer, "_sglang_cuda_host_registered_ranges", ())
    return naming._replace(seams=(*naming.seams, *(address for address, _ in ranges[1:])))


def _tensors(given: Any, layout: str | None, page: int | None, naming: _Naming) -> KVLayout:
    if page is None:
        raise LayoutError("tensors do not show their page_size; give it, in tokens")
    if layout is not None:
        check_option("layout", layout, (*DEVICE, *HOST["K and V"]))
    if layout in HOST["K and V"]:
        rank = len(getattr(given, "shape", ()))
        forms = {what: HOST[what][layout] for what in ("K and V", "MLA") if layout in HOST[what]}
        for what, notation in forms.items():
            if rank == len(notation.replace("(block token)", "slots").split()):
                return _host_buffer(given, what, layout, page, naming)
        raise LayoutError(f"layout {layout!r} with a {type(given).__name__} of {rank} dims; it is one tensor, "
                          f"{' or '.join(f'of {what} {n!r}' for what, n in forms.items())}")  # fmt: skip
    if hasattr(given, "shape"):
        raise LayoutError("one tensor: give layout= of a host buffer, a list with one latent a layer, or a pair of "
                          "lists, all of K and all of V")  # fmt: skip
    if given and hasattr(given[0], "shape"):
        return naming.of(f"layer: {LATENT}", _whole_pages(given, page), sizes={"token": page})
    if len(given) != 2:
        raise LayoutError(f"{len(given)} lists of tensors; give two, all of K and all of V")
    k, v = given
    return _keys_and_values(k, v, layout or "nhd", page, naming)


# A host pool's layout -> the dims of its page rows; a list has one tensor per layer.
PAGE_ROWS = {
    "layer_first": "layer: block dim",
    "page_first": "block layer dim",
    "page_first_direct": "block layer 1 dim",
}


# A part of a pool that one notation describes: its notation, tensors, name and sizes.
_Part = tuple[str, Any, str, dict[str, int]]


def parts_of(pool: Any, kind: str) -> list[_Part] | None:
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
        return [("layer: block dim", pool.index_k_with_scale_buffer, "index", {})]
    if hasattr(pool, "item_bytes") or hasattr(pool, "state_page_bytes"):
        rows = PAGE_ROWS.get(pool.layout, "block layer dim")
        raise LayoutError(f"{kind} keeps page rows of bytes and does not tell their inner order: describe "
                          f"both sides as whole pages, KVLayout.from_tensors({rows!r}, pool.kv_buffer) here and "
                          "'layer: block dim' of the device's buffers, viewed as uint8")  # fmt: skip
    return None


def _latents(pool: Any, kind: str) -> list[_Part]:
    """Describe pages of latents: either rows that hold their scales, or all data of a page, then all scales."""
    page, row, form = int(pool.page_size), int(pool.kv_cache_total_dim), pool.kv_layout
    sizes, buffers = {"token": page}, pool.kv_buffer
    if form.bytes_per_token != row or not form.scale_bytes or form.is_interleaved:  # plain values: row after row
        return [("layer: block (token dim)", [pages[:, : page * row] for pages in buffers], "kv", sizes)]
    data, scales = int(form.data_bytes), int(form.scale_bytes)
    step, start, scale_step = form.row_addressing(page)
    if (step, start, scale_step) != (data, page * data, scales):
        raise LayoutError(f"{kind} has rows of {step} bytes, and scales from byte {start} on, {scale_step} bytes each; "
                          "SGLang 0.5.23 has all data and then all scales, without gaps")  # fmt: skip
    return [
        ("layer: block (token dim)", [pages[:, :start] for pages in buffers], "kv", sizes),
        ("layer: block (token dim)", [pages[:, start : start + page * scales] for pages in buffers], "kv_scale", sizes),
    ]


def _siblings(pool: Any) -> int:
    return len(getattr(pool, "_slot_siblings", ()))


def _states(temporal: Any, conv: Sequence[Any], dims: str, beside: int, kind: str) -> list[_Part]:
    """Describe the recurrent state ``"ssm"`` and the convolutions ``"conv"``, ``"conv_1"``, ...; a slot is a block."""
    if beside:
        raise LayoutError(f"{kind} keeps {beside} kinds of side state that belong to no layer: describe each with "
                          "KVLayout.from_tensors('block dim', ...), flattened to (slots, elements), with a part of its "
                          "own, and merge them with backends.state of the rest")  # fmt: skip
    named = [(f"conv_{k}" if k else "conv", tensor) for k, tensor in enumerate(conv)]
    return [
        (f"{dims} {content_dims(len(tensor.shape) - len(dims.split()))}", tensor, part, {})
        for part, tensor in (*named, ("ssm", temporal))
        if 0 not in tuple(tensor.shape)  # a model of convolutions alone has a state of no elements
    ]
