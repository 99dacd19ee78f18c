"""Rows of sglang: device pools in each of their layouts, host pools in each of theirs, DeepSeek-V4's pages, states."""

from types import SimpleNamespace as Pool

import numpy as np

from kvplan import KVLayout
from kvplan.backends import sglang
from tests.contract.adapters.rows import Row, at, named, noise, per_layer

SLOTS = "kv layer: (block token) head dim"
LATENT = {"parts": "kv", "heads": range(1)}
BYTES = {"kind": np.uint8}


def device(k, v, *, page=4, form="nhd", start=0, **more):
    """What describe reads of an MHATokenToKVPool."""
    first = k[0].shape
    ids = tuple(range(start, start + len(k)))
    return Pool(**{"k_buffer": k, "v_buffer": v, "page_size": page, "size": first[0] - page, "head_num": first[1],
                   "start_layer": start, "model_layer_ids": ids, "kv_cache_layout": form} | more)  # fmt: skip


def halves(shape, v_shape=None, kind=np.int16):
    return per_layer(*shape, kind=kind), per_layer(*(v_shape or shape), kind=kind)


def latents(buffers, *, page=4, **more):
    """What describe reads of an MLATokenToKVPool."""
    return Pool(**{"kv_buffer": buffers, "page_size": page, "size": len(buffers[0]) - page, "start_layer": 0,
                   "model_layer_ids": tuple(range(len(buffers)))} | more)  # fmt: skip


def unified():
    """A slot's entry holds every layer's K and V: rows are 304 bytes apart, of which 256 are content."""
    raw = noise(12 * 152 + 32)[32:].reshape(12, 152)
    k, v = ([raw[:, 32 * l + 16 * kv :][:, :16].reshape(12, 2, 8) for l in (0, 1)] for kv in (0, 1))
    return device(k, v, form="page_major")


def both(*shape, **more):
    k, v = halves(shape)
    return device(k, v, **more)


def post_capture(pool, size):
    return Pool(**{**vars(pool), "post_capture_active": True, "size": size})


flat = at("k_buffer l 4b+t h | v_buffer l 4b+t h")


def native_scales():
    """Native FP4 scales of a page move whole, by head."""
    k, v = halves((12, 2, 16), **BYTES)
    return device(k, v, native_k_scale_buffer=per_layer(3, 2, 4, 2, **BYTES),
                  native_v_scale_buffer=per_layer(3, 2, 4, 2, **BYTES))  # fmt: skip


def fp4(*scale_shape):
    """FP4: 32 values a head, and a byte of scales for 16 of them."""
    k, v = halves((12, 2, 16), **BYTES)
    return device(
        k, v, k_scale_buffer=per_layer(*scale_shape, **BYTES), v_scale_buffer=per_layer(*scale_shape, **BYTES)
    )


def fp4_at(m, l, p, b, t, h):
    scales = (m.k_scale_buffer, m.v_scale_buffer)[p - 2][l] if p > 1 else None
    return flat(m, l, p, b, t, h) if p < 2 else scales.reshape(12, 2, 2)[4 * b + t, h]


def mxfp8():
    k, v = halves((384, 2, 16), **BYTES)
    return device(k, v, page=128, k_scale_buffer=per_layer(3, 2, 32, 4, 4, **BYTES),
                  v_scale_buffer=per_layer(3, 2, 32, 4, 4, **BYTES))  # fmt: skip


def mxfp8_at(m, l, p, b, t, h):
    if p > 1:
        return (m.k_scale_buffer, m.v_scale_buffer)[p - 2][l][b, h, t % 32, t // 32]
    return (m.k_buffer, m.v_buffer)[p][l][128 * b + t, h]


def dsa(pages=3, **more):
    """A DSATokenToKVPool: packed latents and pages of index keys."""
    return latents(per_layer(192, 1, 656, **BYTES), page=64, kpool_use_compress=False,
                   index_k_with_scale_buffer=per_layer(pages, 8_448, **BYTES), **more)  # fmt: skip


DSA_AT = "kv_buffer l 64b+t 0 | index_k_with_scale_buffer l b"
DSA = {"tokens": 64, "parts": "kv index", "heads": range(1)}
DSA_NOTATION = "layer: (block token) 1 dim + layer: block dim"

DEVICE = [
    Row("flat slots", both(12, 2, 8, start=5), lambda m: sglang.describe(m, head_start=4), flat, SLOTS, layers=(5, 6),
        heads=range(4, 6),
            same=(lambda m: sglang.describe((m.k_buffer, m.v_buffer), page_size=4, layer_start=5, head_start=4),
            lambda m: sglang.describe([m.k_buffer, m.v_buffer], page_size=4, layout="nhd", layer_start=5,
                head_start=4))),
    Row("slots after the last whole page", both(14, 2, 8), sglang.describe, flat, SLOTS,
        same=(lambda m: sglang.describe((m.k_buffer, m.v_buffer), page_size=4, layer_start=None, seams=np.array([])),
            lambda m: sglang.describe(m, seams=np.array([])))),
    Row("memory that came after capture", post_capture(both(32, 2, 8), 9), sglang.describe, flat, SLOTS),
    Row("memory that came after capture, HND", post_capture(both(8, 2, 4, 8, form="hnd"), 9), sglang.describe,
        "k_buffer l b h t | v_buffer l b h t", "kv layer: block head token dim"),
    Row("memory that came after capture, MLA", post_capture(latents(per_layer(32, 1, 24)), 9), sglang.describe,
        "kv_buffer l 4b+t 0", "layer: (block token) 1 dim"),
    Row("full layers of a hybrid", both(12, 2, 8, model_layer_ids=(3, 7)), sglang.describe, flat, SLOTS, layers=(3, 7),
        same=(lambda m: sglang.describe(m, layers=[3, 7]),)),
    Row("layers of one's own", both(12, 2, 8, start=2), lambda m: sglang.describe(m, layers=[1, 4]), flat, SLOTS,
        layers=(1, 4)),
    Row("a layer_start of one's own", both(12, 2, 8, start=2), lambda m: sglang.describe(m, layer_start=0), flat,
        SLOTS),
    Row("start_layer", Pool(**{k: v for k, v in vars(both(12, 2, 8, start=2)).items() if k != "model_layer_ids"}),
        sglang.describe, flat, SLOTS, layers=(2, 3)),
    Row("unified", unified(), sglang.describe, flat, SLOTS),
    Row("HND", both(3, 2, 4, 8, form="hnd"), sglang.describe, "k_buffer l b h t | v_buffer l b h t",
        "kv layer: block head token dim",
        same=(lambda m: sglang.describe((m.k_buffer, m.v_buffer), page_size=4, layout="hnd"),)),
    Row("vectorized_5d", device(*halves((3, 2, 2, 16, 8), (3, 2, 2, 16, 8)), page=16, form="vectorized_5d"),
        sglang.describe, lambda m, l, p, b, t, h: m.v_buffer[l][b, h, t // 8, :, t % 8] if p
        else m.k_buffer[l][b, h, :, t], "layer: block head dim.0 token dim.1 + layer: block head token.0 dim token.1",
        tokens=16),
    Row("V of another width", device(*halves((12, 2, 8), (12, 2, 4))), lambda m: sglang.describe(m, head_start=2), flat,
        "layer: (block token) head dim", heads=range(2, 4)),
    Row("latents", latents(per_layer(12, 1, 24), start_layer=9, model_layer_ids=(9, 10)), sglang.describe,
        "kv_buffer l 4b+t 0", "layer: (block token) 1 dim", layers=(9, 10),
        same=(lambda m: sglang.describe(m.kv_buffer, page_size=4, layer_start=9),)),
    Row("latents of some layers",
        latents([noise(n, 1, 24) for n in (0, 12, 12, 0)], model_layer_ids=(8, 9, 10, 11), size=8), sglang.describe,
        "kv_buffer l+1 4b+t 0", "layer: (block token) 1 dim", layers=(9, 10)),
    Row("latents of some layers with numbers", latents([noise(n, 1, 24) for n in (0, 12, 12, 0)], size=8),
        lambda m: sglang.describe(m, layers=[3, 5, 7, 9]), "kv_buffer l+1 4b+t 0", "layer: (block token) 1 dim",
        layers=(5, 7)),
    *(Row(f"latents of {dim} x {size} bytes", latents([noise(128, 1, dim, kind=kind)], page=64), sglang.describe,
        "kv_buffer l 64b+t 0", "layer: (block token) 1 dim", blocks=2, layers=(0,), tokens=64)
        for dim, size, kind in ((576, 2, np.int16), (576, 1, np.int8), (656, 1, np.uint8), (352, 1, np.uint8))),
    Row("index keys", dsa(), sglang.describe, DSA_AT, DSA_NOTATION, **DSA),
    Row("index keys of a page more", dsa(pages=4), sglang.describe, DSA_AT, DSA_NOTATION, **DSA),
    Row("index keys of some layers",
        Pool(**{**vars(dsa()), "index_k_with_scale_buffer": [noise(0, 8_448, **BYTES), noise(3, 8_448, **BYTES)]}),
        sglang.describe, DSA_AT, DSA_NOTATION, **DSA),
    Row("no index keys", Pool(**{**vars(dsa()), "index_k_with_scale_buffer": per_layer(0, 8_448, **BYTES)}),
        sglang.describe, DSA_AT, "layer: (block token) 1 dim", tokens=64),
    Row("an index pool of its own",
        Pool(page_size=64, index_head_dim=128, index_k_with_scale_buffer=per_layer(3, 8_448, **BYTES)), sglang.describe,
        "index_k_with_scale_buffer l b", "layer: block dim", parts="index"),
    Row("keys of an index branch", device(per_layer(12, 2, 8), None), sglang.describe, "k_buffer l 4b+t h",
        "layer: (block token) head dim", parts="index"),
    Row("FP4 scales, a row for all heads", fp4(12, 4), sglang.describe, fp4_at,
        f"{SLOTS} + layer: (block token) (head dim)", parts="k v k_scale v_scale"),
    Row("FP4 scales by head", fp4(12, 2, 2), sglang.describe, fp4_at, f"{SLOTS} + layer: (block token) head dim",
        parts="k v k_scale v_scale"),
    Row("native FP4 scales", native_scales(), sglang.describe, lambda m, l, p, b, t, h: flat(m, l, p, b, t, h) if p < 2
        else (m.native_k_scale_buffer, m.native_v_scale_buffer)[p - 2][l][b, h],
        f"{SLOTS} + layer: block head dim.0 dim.1", parts="k v k_native_scale v_native_scale"),
    Row("MXFP8 scales", mxfp8(), sglang.describe, mxfp8_at, f"{SLOTS} + layer: block head token.1 token.0 dim",
        tokens=128, parts="k v k_scale v_scale"),
    Row("FP4 scales of latents", latents(per_layer(12, 1, 16, **BYTES), kv_scale_buffer=per_layer(12, 2, **BYTES)),
        sglang.describe, "kv_buffer l 4b+t 0 | kv_scale_buffer l 4b+t",
        "layer: (block token) 1 dim + layer: (block token) dim", parts="kv kv_scale"),
]  # fmt: skip

# A host pool's layout -> shape (2 layers, 3 pages of 4 tokens, 4 heads of 8), index, notation.
MHA = {
    "layer_first": ((2, 2, 12, 4, 8), "p l 4b+t h", "kv layer (block token) head dim"),
    "page_first": ((2, 12, 2, 4, 8), "p 4b+t l h", "kv (block token) layer head dim"),
    "page_first_direct": ((2, 3, 2, 4, 4, 8), "p b l t h", "kv block layer token head dim"),
    "page_head": ((2, 3, 4, 4, 2, 8), "p b h t l", "kv block head token layer dim"),
    "page_unified": ((3, 2, 2, 2, 4, 2, 8), lambda m, l, p, b, t, h: m[b, h // 2, l, p, t, h % 2],
                     "block head.0 layer kv token head.1 dim"),
}  # fmt: skip
HOST_MLA = {
    "layer_first": ((2, 12, 1, 24), "l 4b+t 0", "layer (block token) 1 dim"),
    "page_first": ((12, 2, 1, 24), "4b+t l 0", "(block token) layer 1 dim"),
    "page_first_direct": ((3, 2, 4, 1, 24), "b l t 0", "block layer token 1 dim"),
    "page_unified": ((3, 2, 4, 24), "b l t", "block layer token dim"),
}
ALONE = {
    "layer_first": ((2, 12, 2, 8), "l 4b+t h", "layer (block token) head dim"),
    "page_first": ((12, 2, 2, 8), "4b+t l h", "(block token) layer head dim"),
    "page_first_direct": ((3, 2, 4, 2, 8), "b l t h", "block layer token head dim"),
}
INDEX = {
    "layer_first": ((2, 4, 96), "l b", "layer block dim"),
    "page_first": ((4, 2, 1, 96), "b l 0", "block layer 1 dim"),
    "page_first_direct": ((4, 2, 1, 96), "b l 0", "block layer 1 dim"),
}


def host(layout, **more):
    return Pool(**{"layout": layout, "page_size": 4, "page_num": 3, "head_num": 4, "start_layer": 0} | more)


HOST = [
    *(Row(f"host {layout}", noise(*shape),
        lambda m, layout=layout: sglang.describe(host(layout, kv_buffer=m, start_layer=5), head_start=8), index,
        notation, layers=(5, 6), heads=range(8, 12),
        same=(lambda m, layout=layout: sglang.describe(m, layout=layout, page_size=4, layer_start=5, head_start=8),))
        for layout, (shape, index, notation) in MHA.items()),
    *(Row(f"host {layout} of latents", noise(*shape),
        lambda m, layout=layout: sglang.describe(host(layout, kv_buffer=m, kv_lora_rank=16, start_layer=5)), index,
        notation, layers=(5, 6),
        same=(lambda m, layout=layout: sglang.describe(m, layout=layout, page_size=4, layer_start=5),))
        for layout, (shape, index, notation) in HOST_MLA.items()),
    *(Row(f"host {layout}, V of another width", [noise(*shape), noise(*shape[:-1], 4)],
        lambda m, layout=layout: sglang.describe(host(layout, kv_buffer=tuple(m))), f"p {index}", notation)
        for layout, (shape, index, notation) in ALONE.items()),
    *(Row(f"host {layout}, keys of an index branch", noise(*shape),
        lambda m, layout=layout: sglang.describe(host(layout, k_buffer=m)), index, notation, parts="index")
        for layout, (shape, index, notation) in ALONE.items()),
    *(Row(f"host {layout}, index keys beside latents", [noise(*HOST_MLA[layout][0]), noise(*shape, **BYTES)],
        lambda m, layout=layout: KVLayout.merge([sglang.describe(host(layout, kv_buffer=m[0], kv_lora_rank=16)),
                sglang.describe(host(layout, index_k_with_scale_buffer=m[1]))]), f"0 {HOST_MLA[layout][1]} | 1 {index}",
        f"{HOST_MLA[layout][2]} + {notation}", parts="kv index") for layout, (shape, index, notation) in INDEX.items()),
    Row("host index keys of some layers", noise(4, 2, 1, 96, **BYTES),
        lambda m: sglang.describe(host("page_first", index_k_with_scale_buffer=m), layers=[4, 6]), "b l 0",
        "block layer 1 dim", layers=(4, 6), parts="index"),
    Row("host MXFP8 scales", [noise(2, 384, 2, 2, 16, **BYTES), noise(3, 2, 1024, **BYTES), noise(3, 2, 1024, **BYTES)],
        lambda m: sglang.describe(host("page_first", page_size=128, head_num=2, kv_buffer=m[0], k_scale_host=m[1],
                v_scale_host=m[2])),
        lambda m, l, p, b, t, h: m[p - 1][b, l].reshape(2, 32, 4, 4)[h, t % 32, t // 32] if p > 1
        else m[0][p, 128 * b + t, l, h], "kv (block token) layer head dim + block layer (head token.1 token.0 dim)",
        tokens=128, parts="k v k_scale v_scale"),
]  # fmt: skip


def v4_layout(data, scales, *, interleaved=False):
    """What is asked of the KVLayout of SGLang's DeepSeek-V4."""
    step = data + scales if interleaved else data
    return Pool(
        data_bytes=data, scale_bytes=scales, bytes_per_token=data + scales, is_interleaved=interleaved,
        row_addressing=lambda page: (step, data if interleaved else page * data, step if interleaved else scales),
    )  # fmt: skip


def v4(form, nbytes, row=None, page=64):
    return Pool(page_size=page, kv_layout=form, kv_cache_total_dim=row or form.bytes_per_token,
                bytes_per_page_padded=nbytes, qk_nope_head_dim=448, start_layer=0,
                kv_buffer=per_layer(3, nbytes, **BYTES))  # fmt: skip


WHOLE_ROWS = {  # V4.1 with each token's scales behind its data; plain fp8 values, with scales beside or none
    "interleaved rows": (v4_layout(512, 16, interleaved=True), None, 528),
    "plain rows of a pool with scales": (v4_layout(576, 8), 512, 512),
    "plain rows": (v4_layout(512, 0), None, 512),
}
PAGES = [
    Row("data, then scales", v4(v4_layout(576, 8), 37_440), lambda m: sglang.describe(m, layers=[3, 5]),
        "kv_buffer l b 576t:576 | kv_buffer l b 36864+8t:8", "layer: block (token dim)", tokens=64, layers=(3, 5),
        parts="kv kv_scale"),
    *(Row(name, v4(form, 64 * nbytes, row), sglang.describe, f"kv_buffer l b {nbytes}t:{nbytes}",
        "layer: block (token dim)", tokens=64) for name, (form, row, nbytes) in WHOLE_ROWS.items()),
    Row("states", Pool(mamba_cache=Pool(conv=[noise(2, 3, 3, 8)], temporal=noise(2, 3, 2, 4, 4, kind=np.int32)),
            mamba_layer_ids=[1, 3]), sglang.describe, "mamba_cache conv 0 l b | mamba_cache temporal l b",
        "layer block dim.0 dim.1 + layer block dim.0 dim.1 dim.2", layers=(1, 3), parts="conv ssm"),
    Row("states of a host pool", Pool(layout="page_first", page_size=1, conv_buffer=[noise(3, 2, 1, 3, 8)],
            slot_state_buffers=[], temporal_buffer=noise(3, 2, 1, 2, 4, 4, kind=np.int32)),
        lambda m: sglang.describe(m, layers=[1, 3]), "conv_buffer 0 b l 0 | temporal_buffer b l 0",
        "block layer 1 dim.0 dim.1 + block layer 1 dim.0 dim.1 dim.2", layers=(1, 3), parts="conv ssm"),
    Row("states of a layer-first host pool", Pool(layout="layer_first", page_size=1, conv_buffer=[noise(2, 3, 3, 8)],
            slot_state_buffers=[], temporal_buffer=noise(2, 3, 2, 4, 4, kind=np.int32)), sglang.describe,
        "conv_buffer 0 l b | temporal_buffer l b", "layer block dim.0 dim.1 + layer block dim.0 dim.1 dim.2",
        parts="conv ssm"),
    Row("two convolutions and a state",
        Pool(mamba_cache=Pool(conv=[noise(2, 3, 3, 8) for _ in "01"], temporal=noise(2, 3, 2, 4, 4, kind=np.int32))),
        sglang.describe, "mamba_cache conv 0 l b | mamba_cache conv 1 l b | mamba_cache temporal l b",
        "layer block dim.0 dim.1 + layer block dim.0 dim.1 dim.2", parts="conv conv_1 ssm"),
    Row("convolutions alone",
        Pool(mamba_cache=Pool(conv=[noise(2, 3, 3, 8) for _ in "01"], temporal=noise(2, 3, 0, kind=np.int32))),
        sglang.describe, "mamba_cache conv p l b", "layer block dim.0 dim.1", parts="conv conv_1"),
]  # fmt: skip

ROWS = named({"sglang": [*DEVICE, *HOST, *PAGES]})
