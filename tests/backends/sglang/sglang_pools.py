"""Stand-ins for SGLang 0.5.23's pools: the same members, their buffers built as the engine builds them."""

from types import SimpleNamespace

import torch


def ceil_to(number, step):
    return -(-number // step) * step


def mha_pool(*, size=12, page=4, heads=4, dim=8, layers=3, v_dim=None, form="nhd", start=0, dtype=torch.float16):
    """MHATokenToKVPool: K and V are halves of one allocation a layer where they have one shape."""
    rows, v_dim, x = size + page, v_dim or dim, 16 // dtype.itemsize
    if form == "vectorized_5d":
        pages = rows // page
        k_buffer = [torch.zeros(pages, heads, dim // x, page, x, dtype=dtype) for _ in range(layers)]
        v_buffer = [torch.zeros(pages, heads, page // x, v_dim, x, dtype=dtype) for _ in range(layers)]
    elif dim != v_dim:
        k_buffer, v_buffer = ([torch.zeros(rows, heads, d, dtype=dtype) for _ in range(layers)] for d in (dim, v_dim))
    else:
        shape = (rows // page, heads, page, dim) if form == "hnd" else (rows, heads, dim)
        padded = shape[0] if form == "hnd" else ceil_to(rows, page)
        fused = [torch.zeros(2, padded, *shape[1:], dtype=dtype) for _ in range(layers)]
        k_buffer, v_buffer = [f[0, : shape[0]] for f in fused], [f[1, : shape[0]] for f in fused]
    return SimpleNamespace(
        size=size, page_size=page, head_num=heads, head_dim=dim, v_head_dim=v_dim, layer_num=layers, start_layer=start,
        model_layer_ids=tuple(range(start, start + layers)), kv_cache_layout=form, k_buffer=k_buffer,
        v_buffer=v_buffer, k_scale_buffer=None, v_scale_buffer=None, post_capture_active=False,
    )  # fmt: skip


def mla_pool(*, size=12, page=4, dim=24, layers=3, start=0, owned=None, dtype=torch.float16):
    """MLATokenToKVPool; layers of other ranks are a tensor without rows."""
    held = range(layers) if owned is None else owned
    return SimpleNamespace(
        size=size, page_size=page, kv_lora_rank=dim - 8, kv_cache_dim=dim, layer_num=layers, start_layer=start,
        model_layer_ids=tuple(range(start, start + layers)), kv_scale_buffer=None, post_capture_active=False,
        kv_buffer=[torch.zeros((size + page) * (k in held), 1, dim, dtype=dtype) for k in range(layers)],
    )  # fmt: skip


def dsa_pool(*, size=192, page=64, layers=3, skip=(), start=0):
    """DSATokenToKVPool: packed latents of 656 bytes, and pages of index keys of 64 * 132 bytes."""
    pool = mla_pool(size=size, page=page, dim=656, layers=layers, start=start, dtype=torch.uint8)
    pages = (size + page + 1) // page
    pool.index_k_with_scale_buffer = [
        torch.zeros(0 if k in skip else pages, page * 132, dtype=torch.uint8) for k in range(layers)
    ]
    pool.kpool_use_compress = False
    return pool


def host_mha(layout, *, pages=4, page=4, heads=4, dim=8, layers=3, groups=2, start=0, dtype=torch.float16):
    """MHATokenToKVPoolHost."""
    shape = {
        "layer_first": (2, layers, pages * page, heads, dim),
        "page_first": (2, pages * page, layers, heads, dim),
        "page_first_direct": (2, pages, layers, page, heads, dim),
        "page_head": (2, pages, heads, page, layers, dim),
        "page_unified": (pages, groups, layers, 2, page, heads // groups, dim),
    }[layout]
    return SimpleNamespace(
        layout=layout, page_size=page, page_num=pages, size=pages * page, head_num=heads, head_dim=dim,
        layer_num=layers, start_layer=start, kv_buffer=torch.zeros(shape, dtype=dtype),
    )  # fmt: skip


def host_mla(layout, *, pages=4, page=4, dim=24, layers=3, start=0, dtype=torch.float16):
    """MLATokenToKVPoolHost."""
    shape = {
        "layer_first": (layers, pages * page, 1, dim),
        "page_first": (pages * page, layers, 1, dim),
        "page_first_direct": (pages, layers, page, 1, dim),
        "page_unified": (pages, layers, page, dim),
    }[layout]
    return SimpleNamespace(
        layout=layout, page_size=page, page_num=pages, size=pages * page, kv_lora_rank=dim - 8, kv_cache_dim=dim,
        layer_num=layers, start_layer=start, kv_buffer=torch.zeros(shape, dtype=dtype),
    )  # fmt: skip


def host_index(layout, *, pages=4, layers=3, nbytes=8448, start=0):
    """DSAIndexerPoolHost: one page more than the latents' pool has."""
    shape = (layers, pages + 1, nbytes) if layout == "layer_first" else (pages + 1, layers, 1, nbytes)
    return SimpleNamespace(
        layout=layout, page_size=64, page_num=pages, start_layer=start, layer_num=layers,
        index_k_with_scale_buffer=torch.zeros(shape, dtype=torch.uint8),
    )  # fmt: skip


MHA_LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head", "page_unified")
MLA_LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_unified")


def mha_row(layout, buffer, page=4):
    """``(layer, kv, block, token, head)`` -> the row of a host buffer, by the order the engine gives its dims."""
    per_group = buffer.shape[5] if layout == "page_unified" else 0
    return {
        "layer_first": lambda layer, kv, block, token, head: buffer[kv, layer, block * page + token, head],
        "page_first": lambda layer, kv, block, token, head: buffer[kv, block * page + token, layer, head],
        "page_first_direct": lambda layer, kv, block, token, head: buffer[kv, block, layer, token, head],
        "page_head": lambda layer, kv, block, token, head: buffer[kv, block, head, token, layer],
        "page_unified": lambda layer, kv, block, token, head: buffer[
            block, head // per_group, layer, kv, token, head % per_group
        ],
    }[layout]


def mla_row(layout, buffer, page=4):
    """The same of an MLA host buffer."""
    return {
        "layer_first": lambda layer, kv, block, token, head: buffer[layer, block * page + token, 0],
        "page_first": lambda layer, kv, block, token, head: buffer[block * page + token, layer, 0],
        "page_first_direct": lambda layer, kv, block, token, head: buffer[block, layer, token, 0],
        "page_unified": lambda layer, kv, block, token, head: buffer[block, layer, token],
    }[layout]
