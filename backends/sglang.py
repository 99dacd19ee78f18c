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

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from kvplan.backends._tensors import Numbers, check_option, content_dims, rank_of
from kvplan.base.values import integer, integers, optional_integer
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


# What a pool has whose pages are of an order that no notation tells, or that has pages of several kinds.
_UNKNOWN = (
    "kpool_use_compress", "kv_buffer_rope", "index_k_payload_buffer", "item_bytes", "state_page_bytes",
    "stores_page_envelope",
)  # fmt: skip


class _Part(NamedTuple):
    """A part of a pool that one notation describes; ``layers`` if it lacks some, ``whole`` if ``tensors`` are a cut."""

    notation: str
    tensors: Any
    name: str = "kv"
    sizes: Mapping[str, int] = {}
    layers: tuple[int, ...] | None = None
    whole: Any = None


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
    numbers: Numbers = {
        "layer_start": optional_integer("layer_start", layer_start, least=0) or 0,
        "head_start": head_start,
        "layers": None if layers is None else integers("layers", layers, least=0),
        "seams": integers("seams", seams),
    }
    page_size = optional_integer("page_size", page_size, least=1)
    if isinstance(pool, list | tuple) or hasattr(pool, "shape"):
        return _merged(_tensors(pool, layout, page_size), numbers)
    kind = type(pool).__name__
    if layout is not None or page_size is not None or numbers["seams"]:
        raise LayoutError(f"a pool ({kind}) has its own layout, page_size and seams; leave them out")
    _check_known(pool, kind)
    if layers is None and layer_start is None:
        given = getattr(pool, "model_layer_ids", getattr(pool, "mamba_layer_ids", ()))
        numbers["layers"] = integers("model_layer_ids", given, least=0) or None
        numbers["layer_start"] = integer("start_layer", getattr(pool, "start_layer", 0), least=0)
    pages = _pages(pool, kind)
    if pages is not None:
        return _merged(pages, numbers)
    return _merged(_host_pool(pool, kind) if hasattr(pool, "layout") else _device_pool(pool, kind, numbers), numbers)


def _merged(parts: Iterable[_Part], numbers: Numbers) -> KVLayout:
    """Merge the parts. The borders between the registrations of a large buffer, which the engine notes, are seams."""
    layouts = []
    for notation, tensors, name, sizes, layers, whole in parts:
        ranges = getattr(tensors if whole is None else whole, "_sglang_cuda_host_registered_ranges", ())
        seams = (*numbers["seams"], *(address for address, _ in ranges[1:]))
        named = numbers | {"part": name, "seams": seams, "layers": layers or numbers["layers"]}
        layouts.append(KVLayout.from_tensors(notation, tensors, sizes=sizes, **named))
    return KVLayout.merge(layouts)


def _check_known(pool: Any, kind: str) -> None:
    """Raise LayoutError if this module does not describe a pool."""
    inner = [name for name in _INNER if _has(pool, name)]
    if inner:  # each of them has its own page ids
        raise LayoutError(f"{kind} is a pool of pools, each with page ids of its own; describe what "
                          f"{', '.join(inner)} hold{'s' if len(inner) == 1 else ''}, one by one")  # fmt: skip
    siblings = getattr(pool, "_slot_siblings", getattr(pool, "slot_state_buffers", ()))
    unknown = [name for name in _UNKNOWN if rank_of(value := getattr(pool, name, None)) or value]
    unknown += ["side state of slots"] * bool(siblings)
    whole = any(rank_of(getattr(pool, name, None)) for name in ("k_buffer", "kv_buffer"))
    if not hasattr(pool, "layout"):
        unknown += ["one tensor for all layers, as on Ascend"] * whole
    elif whole and not any(hasattr(pool, name) for name in ("head_num", "kv_lora_rank", "index_k_with_scale_buffer")):
        unknown.append("packed page rows")
    if unknown:
        raise LayoutError(
            f"{kind} keeps {', '.join(unknown)}, whose order inside a page this module does not know. Describe each "
            "buffer with KVLayout.from_tensors, as whole blocks ('block dim', 'layer: block dim') on both sides where "
            "its order is unknown, each with a part of its own, and merge"
        )


def _has(pool: Any, name: str) -> bool:
    return getattr(pool, name, None) is not None


def _member(pool: Any, kind: str, name: str) -> Any:
    if not _has(pool, name):
        raise LayoutError(f"{kind} has no {name!r}; give a device or host pool of SGLang 0.5.23, or tensors with "
                          "layout= and page_size=")  # fmt: skip
    return getattr(pool, name)


def _device_pool(pool: Any, kind: str, numbers: Numbers) -> Iterator[_Part]:
    page = integer("page_size", _member(pool, kind, "page_size"), least=1)
    # If memory was allocated after the capture of graphs, only the slots up to the pool's size have memory.
    slots = integer("size", _member(pool, kind, "size")) + page if getattr(pool, "post_capture_active", False) else None
    sizes = {"token": page}
    if _has(pool, "k_buffer"):
        if _has(pool, "v_buffer"):
            form = getattr(pool, "kv_cache_layout", "nhd")
            yield from _keys_and_values(pool.k_buffer, pool.v_buffer, form, page, slots)
            yield from _scales(pool, page, slots)
        else:  # MiniMax's index branch reads no V
            yield _Part(f"layer: {SLOTS}", _whole_pages(pool.k_buffer, page, slots), "index", sizes)
        return
    rows, layers = _with_rows(_member(pool, kind, "kv_buffer"), numbers)
    rows = _whole_pages(rows, page, slots)
    yield _Part(f"layer: {LATENT}", rows, "kv", sizes, layers)
    if _has(pool, "kv_scale_buffer"):
        yield _Part("layer: (block token) dim", _whole_pages(pool.kv_scale_buffer, page, slots), "kv_scale", sizes)
    index = getattr(pool, "index_k_with_scale_buffer", None) or ()
    if any(len(pages) for pages in index):  # all keys of a page, then all scales; empty if layers share their top-k
        keys, layers = _with_rows(index, numbers)
        count, blocks = len(keys[0]), len(rows[0]) // page
        if not blocks <= count <= blocks + 1:
            raise LayoutError(f"{kind} has {count} pages of index keys and {blocks} of latents, so that their ids "
                              "differ (decode context parallelism); describe kv_buffer by itself")  # fmt: skip
        yield _Part("layer: block dim", [pages[:blocks] for pages in keys], "index", layers=layers)


def _keys_and_values(k: Any, v: Any, form: str, page: int, slots: int | None = None) -> Iterator[_Part]:
    check_option("kv_cache_layout", form, DEVICE)
    flat, sizes = DEVICE[form][0] == SLOTS, {"token": page}
    halves = [_whole_pages(half, page, slots, page_rows=not flat) for half in (k, v)]
    if DEVICE[form][0] == DEVICE[form][1] and [tuple(t.shape) for t in halves[0]] == [
        tuple(t.shape) for t in halves[1]
    ]:
        yield _Part(f"kv layer: {DEVICE[form][0]}", halves, "kv", sizes)
    else:  # K and V of different orders, or of different widths
        for half, dims, part in zip(halves, DEVICE[form], "kv", strict=True):
            yield _Part(f"layer: {dims}", half, part, sizes)


def _scales(pool: Any, page: int, slots: int | None) -> Iterator[_Part]:
    """Yield scales of K and of V: one per 16 values (FP4) or 32 (MXFP8), and FP4's in the order of its kernels."""
    for half in "kv":
        if _has(pool, f"{half}_scale_buffer"):
            scales, part, sizes = getattr(pool, f"{half}_scale_buffer"), f"{half}_scale", {"token": page}
            if len(scales[0].shape) == 5:
                yield _Part(f"layer: block {MXFP8}", scales, part, sizes)
            elif len(scales[0].shape) == 3:
                yield _Part(f"layer: {SLOTS}", _whole_pages(scales, page, slots), part, sizes)
            else:
                sizes["head"] = int(pool.head_num)
                yield _Part("layer: (block token) (head dim)", _whole_pages(scales, page, slots), part, sizes)
        if _has(pool, f"native_{half}_scale_buffer"):  # the kernel decides the order inside a page, which moves whole
            native = getattr(pool, f"native_{half}_scale_buffer")
            yield _Part("layer: block head dim.0 dim.1", native, f"{half}_native_scale")


def _with_rows(buffers: Any, numbers: Numbers) -> tuple[list[Any], tuple[int, ...] | None]:
    """Return the tensors of the layers that have rows on this rank, and the layers' numbers if others have none."""
    rows = [rows for rows in buffers if len(rows)]
    if len(rows) == len(buffers):
        return rows, None
    first, layers = numbers["layer_start"], numbers["layers"]
    given = tuple(range(first, first + len(buffers)) if layers is None else layers)
    if len(given) != len(buffers):
        raise LayoutError(f"layers are {given}; the pool has {len(buffers)}, those without rows counted")
    return rows, tuple(number for number, rows in zip(given, buffers, strict=True) if len(rows))


def _whole_pages(tensors: Any, page: int, slots: int | None = None, *, page_rows: bool = False) -> list[Any]:
    """Return tensors cut to the whole pages that have memory. A row is a slot, or a page."""
    step, limit = (1, page) if page_rows else (page, 1)
    counts = [len(t) if slots is None else min(len(t), slots // limit) for t in tensors]
    return [t[: count // step * step] for t, count in zip(tensors, counts, strict=True)]


def _host_pool(pool: Any, kind: str) -> Iterator[_Part]:
    page, layout = integer("page_size", _member(pool, kind, "page_size"), least=1), pool.layout
    if _has(pool, "index_k_with_scale_buffer"):
        buffer, count = pool.index_k_with_scale_buffer, _member(pool, kind, "page_num")  # its last page has no id
        first = layout == "layer_first"
        dims, pages = ("layer block dim", buffer[:, :count]) if first else ("block layer 1 dim", buffer[:count])
        yield _Part(dims, pages, "index", whole=buffer)
        return
    if not _has(pool, "kv_buffer"):
        if not _has(pool, "k_buffer"):
            raise LayoutError(f"{kind} has no kv_buffer: it only allocates, or was destroyed")
        yield _host_buffer(pool.k_buffer, "K or V alone", layout, page, "index")
    elif isinstance(pool.kv_buffer, list | tuple):  # V of another width than K
        for half, part in zip(pool.kv_buffer, "kv", strict=True):
            yield _host_buffer(half, "K or V alone", layout, page, part)
    else:
        yield _host_buffer(pool.kv_buffer, "MLA" if _has(pool, "kv_lora_rank") else "K and V", layout, page)
    for half in "kv":
        if _has(pool, f"{half}_scale_host"):
            sizes = {"token.1": 32, "token.0": page // 32, "head": int(pool.head_num)}
            yield _Part(f"block layer ({MXFP8})", getattr(pool, f"{half}_scale_host"), f"{half}_scale", sizes)


def _host_buffer(buffer: Any, what: str, layout: str, page: int, part: str = "kv") -> _Part:
    check_option(f"layout, of {what},", layout, HOST[what])
    return _Part(HOST[what][layout], buffer, part, {"token": page})


def _tensors(given: Any, layout: str | None, page: int | None) -> Iterator[_Part]:
    if page is None:
        raise LayoutError("tensors do not show their page_size; give it, in tokens")
    if layout is not None:
        check_option("layout", layout, (*DEVICE, *HOST["K and V"]))
    if layout in HOST["K and V"]:
        rank = rank_of(given)
        forms = {what: HOST[what][layout] for what in ("K and V", "MLA") if layout in HOST[what]}
        for what, notation in forms.items():
            if rank == len(notation.replace("(block token)", "slots").split()):
                yield _host_buffer(given, what, layout, page)
                return
        raise LayoutError(f"layout {layout!r} with a {type(given).__name__} of {rank} dims; it is one tensor, "
                          f"{' or '.join(f'of {what} {n!r}' for what, n in forms.items())}")  # fmt: skip
    if hasattr(given, "shape"):
        raise LayoutError("one tensor: give layout= of a host buffer, a list with one latent a layer, or a pair of "
                          "lists, all of K and all of V")  # fmt: skip
    if given and hasattr(given[0], "shape"):
        yield _Part(f"layer: {LATENT}", _whole_pages(given, page), "kv", {"token": page})
    elif len(given) == 2:
        yield from _keys_and_values(given[0], given[1], layout or "nhd", page)
    else:
        raise LayoutError(f"{len(given)} lists of tensors; give two, all of K and all of V")


def _pages(pool: Any, kind: str) -> list[_Part] | None:
    """Return the parts of a pool of pages or of states; None for any other pool."""
    if hasattr(pool, "mamba_cache"):
        return _states(pool.mamba_cache.temporal, pool.mamba_cache.conv, "layer block")
    if hasattr(pool, "temporal_buffer"):
        dims = "block layer 1" if str(pool.layout).startswith("page_first") else "layer block"
        return _states(pool.temporal_buffer, pool.conv_buffer, dims)
    if hasattr(pool, "bytes_per_page_padded"):
        return _latents(pool, kind)
    if hasattr(pool, "index_head_dim") and not hasattr(pool, "kv_buffer") and not hasattr(pool, "layout"):
        return [_Part("layer: block dim", pool.index_k_with_scale_buffer, "index")]
    return None


def _latents(pool: Any, kind: str) -> list[_Part]:
    """Describe pages of latents: either rows that hold their scales, or all data of a page, then all scales."""
    page, row, form = int(pool.page_size), int(pool.kv_cache_total_dim), pool.kv_layout
    sizes, buffers, dims = {"token": page}, pool.kv_buffer, "layer: block (token dim)"
    if form.bytes_per_token != row or not form.scale_bytes or form.is_interleaved:  # plain values: row after row
        return [_Part(dims, [pages[:, : page * row] for pages in buffers], "kv", sizes)]
    data, scales = int(form.data_bytes), int(form.scale_bytes)
    step, start, scale_step = form.row_addressing(page)
    if (step, start, scale_step) != (data, page * data, scales):
        raise LayoutError(f"{kind} has rows of {step} bytes, and scales from byte {start} on, {scale_step} bytes each; "
                          "SGLang 0.5.23 has all data and then all scales, without gaps")  # fmt: skip
    behind = [pages[:, start : start + page * scales] for pages in buffers]
    return [_Part(dims, [pages[:, :start] for pages in buffers], "kv", sizes), _Part(dims, behind, "kv_scale", sizes)]


def _states(temporal: Any, conv: Sequence[Any], dims: str) -> list[_Part]:
    """Describe the recurrent state ``"ssm"`` and the convolutions ``"conv"``, ``"conv_1"``, ...; a slot is a block."""
    named = [(f"conv_{k}" if k else "conv", tensor) for k, tensor in enumerate(conv)]
    return [
        _Part(f"{dims} {content_dims(len(tensor.shape) - len(dims.split()))}", tensor, part)
        for part, tensor in (*named, ("ssm", temporal))
        if 0 not in tuple(tensor.shape)  # a model of convolutions alone has a state of no elements
    ]
