"""Rows of flexkv, lmcache, tensorrt_llm and transformers, and the published bytes of a block and layer in each."""

from types import SimpleNamespace

import numpy as np

from kvplan import KVLayout
from kvplan.backends import flash_attention, flashinfer, flexkv, lmcache, sglang, tensorrt_llm, transformers, vllm
from tests.contract.adapters.rows import Row, named, noise, per_layer

LATENT = {"parts": "kv", "heads": range(1)}


def told(name, *, mla=False, **other):
    """FlexKV's KVCacheLayout of 2 layers, 3 blocks of 4 tokens, 2 heads (1 for MLA) of 8."""
    sizes = {"num_layer": 2, "num_block": 3, "tokens_per_block": 4, "num_head": 1 if mla else 2, "head_size": 8}
    return SimpleNamespace(**({"type": SimpleNamespace(name=name), "is_mla": mla} | sizes | other))


BLOCKFIRST, LAYERFIRST, LAYERBLOCK = (
    "block layer kv token head dim", "layer kv block token head dim", "layer block kv token head dim"
)  # fmt: skip


FLEXKV = [
    *(Row(name, noise(*shape), lambda m, name=name: flexkv.describe(m, name, layer_start=2, head_start=6), index,
        notation, layers=(2, 3), heads=range(6, 8),
            same=(lambda m, name=name: flexkv.describe(m, told(name), layer_start=2, head_start=6),
            lambda m, name=name: flexkv.describe(m.reshape(-1), told(name), layer_start=2, head_start=6),
            lambda m, name=name: flexkv.describe(SimpleNamespace(data=m.reshape(-1), kv_layout=told(name)),
                layer_start=2, head_start=6)))
        for name, shape, index, notation in (("BLOCKFIRST", (3, 2, 2, 4, 2, 8), "b l p t h", BLOCKFIRST),
        ("LAYERFIRST", (2, 2, 3, 4, 2, 8), "l p b t h", LAYERFIRST),
        ("LAYERBLOCK", (2, 3, 2, 4, 2, 8), "l b p t h", LAYERBLOCK))),
    *(Row(f"{name} MLA", noise(*shape), lambda m, name=name: flexkv.describe(m, told(name, mla=True)), index,
        notation.replace("kv", "1"), **LATENT, same=(lambda m, name=name: flexkv.describe(m, name),
            lambda m, name=name: flexkv.describe(m.reshape(-1), told(name, mla=True))))
        for name, shape, index, notation in (("BLOCKFIRST", (3, 2, 1, 4, 1, 8), "b l 0 t 0", BLOCKFIRST),
        ("LAYERFIRST", (2, 1, 3, 4, 1, 8), "l 0 b t 0", LAYERFIRST),
        ("LAYERBLOCK", (2, 3, 1, 4, 1, 8), "l b 0 t 0", LAYERBLOCK))),
    Row("a tensor a layer, LAYERFIRST", per_layer(2, 3, 4, 2, 8),
        lambda m: flexkv.describe(m, "LAYERFIRST", layers=[1, 5]), "l p b t h", "layer: kv block token head dim",
        layers=(1, 5), same=(lambda m: flexkv.describe(m, told("LAYERFIRST"), layers=[1, 5]),
            lambda m: flexkv.describe([x.reshape(-1) for x in m], told("LAYERFIRST"), layers=[1, 5]))),
    Row("a tensor a layer, LAYERBLOCK", per_layer(3, 2, 4, 2, 8), lambda m: flexkv.describe(m, "LAYERBLOCK"),
        "l b p t h", "layer: block kv token head dim",
        same=(lambda m: flexkv.describe([x.reshape(-1) for x in m], told("LAYERBLOCK")),)),
    Row("a latent a layer", per_layer(3, 4, 8), lambda m: flexkv.describe(m, told("LAYERFIRST", mla=True)), "l b t",
        "layer: block token dim", same=(lambda m: flexkv.describe(m, "LAYERBLOCK"),
            lambda m: flexkv.describe([x[None, :, :, None] for x in m], "LAYERFIRST"),
            lambda m: flexkv.describe([x[:, None, :, None] for x in m], "LAYERBLOCK"))),
    Row("index keys", per_layer(3, 4, 8), lambda m: flexkv.describe(m, "LAYERFIRST", part="index"), "l b t",
        "layer: block token dim", parts="index"),
    Row("scales", noise(3, 2, 2, 4, 2, 8, kind=np.uint8), lambda m: flexkv.describe(m, "BLOCKFIRST", part="scale"),
        "b l p t h", BLOCKFIRST, parts="k_scale v_scale"),
    Row("older and newer objects", noise(3, 2, 2, 4, 2, 8), lambda m: flexkv.describe(m, "BLOCKWISE"), "b l p t h",
        BLOCKFIRST, same=(lambda m: flexkv.describe(m.reshape(-1),
                told("BLOCKFIRST", mla=True, kv_dim=2, num_head=2, layer_groups=None, packed_kv=False)),)),
    Row("older LAYERWISE", noise(2, 2, 3, 4, 2, 8), lambda m: flexkv.describe(m, "LAYERWISE"), "l p b t h", LAYERFIRST),
    Row("a newer latent", noise(3 * 2 * 4 * 8), lambda m: flexkv.describe(m, told("BLOCKFIRST", kv_dim=1, num_head=1)),
        "64b+32l+8t:8", "(block layer token head dim)", **LATENT),
]  # fmt: skip

# Each name of LMCache's EngineKVFormat, in the enum's order: shape of a tensor, and where an element is.
FORMATS = {
    "NB_NL_TWO_BS_NH_HS": ((3, 2, 2, 4, 2, 8), "b l p t h", "block layer kv token head dim"),
    "NL_X_TWO_NB_BS_NH_HS": ((2, 3, 4, 2, 8), "l p b t h", "layer: kv block token head dim"),
    "NL_X_NB_TWO_BS_NH_HS": ((3, 2, 4, 2, 8), "l b p t h", "layer: block kv token head dim"),
    "NL_X_NB_BS_HS": ((3, 4, 8), "l b t", "layer: block token dim"),
    "TWO_X_NL_X_NBBS_NH_HS": ((12, 2, 8), "p l 4b+t h", "kv layer: (block token) head dim"),
    "NL_X_NBBS_ONE_HS": ((12, 1, 8), "l 4b+t 0", "layer: (block token) 1 dim"),
    "NL_X_TWO_NB_NH_BS_HS": ((2, 3, 2, 4, 8), "l p b h t", "layer: kv block head token dim"),
    "NL_X_NB_TWO_NH_BS_HS": ((3, 2, 2, 4, 8), "l b p h t", "layer: block kv head token dim"),
    "NB_NL_TWO_NH_BS_HS": ((3, 2, 2, 2, 4, 8), "b l p h t", "block layer kv head token dim"),
    "TWO_X_NL_X_NB_BS_NH_HS": ((3, 4, 2, 8), "p l b t h", "kv layer: block token head dim"),
    "NL_X_NB_NH_BS_TWO_HS": ((3, 2, 4, 2, 8), "l b h t p", "layer: block head token kv dim"),
    "NL_X_NB_BS_NH_TWO_HS": ((3, 4, 2, 2, 8), "l b t h p", "layer: block token head kv dim"),
    "NL_X_NB_NH_BS_CS": ((3, 2, 4, 16), "l b h t 8p:8", "layer: block head token (kv dim)"),
    "NL_X_NB_BS_NH_CS": ((3, 4, 2, 16), "l b t h 8p:8", "layer: block token head (kv dim)"),
    "NL_X_NB_BSV_BSS": ((3, 64, 132), "l b", "layer: block dim.0 dim.1"),
    "NL_X_TWO_NB_NH_ONE_BS_HS": ((2, 3, 2, 1, 4, 8), "l p b h 0 t", "layer: kv block head 1 token dim"),
    "NL_X_TWO_X_NB_BS_NH_HS": ((3, 4, 2, 8), "l p b t h", "layer kv: block token head dim"),
    "NL_X_NP_X_NB_BS_ONE_HS": None,  # planes of two widths: described one by one, below
    "NL_X_NB_BS_NH_HS": None,  # K and V one by one, below
}


def engine_format(name, shape, index, notation):
    nested = [2] * name.count("_X_")
    memory = noise(*shape) if not nested else per_layer(*shape) if nested == [2] else [per_layer(*shape) for _ in "kv"]
    if name == "NL_X_NB_BSV_BSS":
        opaque = {"tokens": 1, "layers": (5, 6), "parts": "index", "heads": range(1)}
        return Row(name, per_layer(*shape, kind=np.uint8),
                   lambda m: lmcache.describe(m, engine_format=name, layer_start=5, part="index"), index,
                   notation, **opaque)  # fmt: skip
    tokens = {"block_tokens": 4} if "NBBS" in name else {}
    latent = {} if "kv" in notation else LATENT
    member = SimpleNamespace(name=name)
    return Row(name, memory, lambda m: lmcache.describe(m, engine_format=name, layer_start=5, **tokens), index,
               notation, layers=(5, 6), **latent,
               same=(lambda m: lmcache.describe(m, engine_format=member, layer_start=5, **tokens),))  # fmt: skip


class MemoryObject(SimpleNamespace):
    """As LMCache's: groups of layers one after the other in one buffer, each with a shape."""

    def get_tensor(self, group):
        sizes = [int(np.prod(shape)) for shape in self.metadata.shapes]
        begin = sum(sizes[:group])
        return self.raw[begin : begin + sizes[group]].reshape(self.metadata.shapes[group])

    @property
    def tensor(self):
        assert len(self.metadata.shapes) == 1, "the engine's raises"
        return self.get_tensor(0)


def objects(memory, *shapes, fmt="KV_2LTD"):
    return [MemoryObject(raw=raw, metadata=SimpleNamespace(fmt=SimpleNamespace(name=fmt), shapes=shapes))
            for raw in memory]  # fmt: skip


def buffers(count, count_elements, step):
    """Cut out of one buffer as the allocators do, and not in order."""
    buffer = noise(count * step)
    return [buffer[k * step :][:count_elements] for k in ((k * 2 + 1) % count for k in range(count))]


def layerwise(name, shape, index, **facts):
    return Row(f"layerwise {name}", [per_layer(*shape, layers=3) for _ in "01"],
               lambda m: lmcache.describe([objects([x.reshape(-1) for x in layer], shape, fmt=name) for layer in m],
                                          heads=None if name == "KV_MLA_FMT" else 2), index, **facts)  # fmt: skip


CHUNK = {"tokens": 8, "heads": range(2)}
LMCACHE = [
    *(engine_format(name, *row) for name, row in FORMATS.items() if row),
    Row("planes of two widths", [[noise(3, 4, 1, 64), noise(3, 4, 1, 8)] for _ in "01"],
        lambda m: KVLayout.merge([lmcache.describe([layer[k] for layer in m], engine_format="NL_X_NB_BS_ONE_HS",
                    part=part) for k, part in enumerate(("ckv", "kpe"))]), "l p b t 0", "layer: block token 1 dim",
        parts="ckv kpe"),
    Row("K and V one by one", per_layer(3, 4, 2, 8, layers=4),
        lambda m: KVLayout.merge([lmcache.describe(m[2 * k :][:2], engine_format="NL_X_NB_BS_NH_HS", part="kv"[k])
                for k in (0, 1)]), "2p+l b t h", "layer: block token head dim"),
    Row("objects", buffers(3, 2 * 2 * 8 * 16, 768),
        lambda m: lmcache.describe(objects(m, (2, 2, 8, 16)), heads=2, layer_start=7, head_start=2),
        "b 256p+128l+16t+8h:8", "block: kv layer token (head dim)", layers=(7, 8), tokens=8, heads=range(2, 4),
        same=(lambda m: lmcache.describe([x.reshape(2, 2, 8, 2, 8) for x in m], layer_start=7, head_start=2),
            lambda m: lmcache.describe([x.reshape(2, 2, 8, 16) for x in m], heads=2, layer_start=7, head_start=2,
                block_tokens=8))),
    Row("one object", noise(512), lambda m: lmcache.describe(objects([m], (2, 2, 8, 16))[0], heads=2),
        "256p+128l+16t+8h:8", "kv layer token (head dim)", blocks=1, **CHUNK,
        same=(lambda m: lmcache.describe(objects([m], (2, 2, 8, 16)), heads=2),)),
    Row("a pool of objects", noise(3, 2, 2, 8, 16), lambda m: lmcache.describe(m, heads=2), "b p l t 8h:8",
        "block kv layer token (head dim)", **CHUNK,
        same=(lambda m: lmcache.describe(list(m), heads=2), lambda m: lmcache.describe(m.reshape(3, 2, 2, 8, 2, 8)))),
    Row("a pool of objects by head", noise(3, 2, 2, 8, 2, 8), lmcache.describe, "b p l t h",
        "block kv layer token head dim", **CHUNK),
    *(Row(f"latents, {fmt} of {len(shape)} dims", buffers(3, 256, 512),
        lambda m, fmt=fmt, shape=shape: lmcache.describe(objects(m, shape, fmt=fmt)), "b 128l+16t:16", notation,
        tokens=8) for shape, notation in (((2, 8, 16), "block: layer token dim"),
        ((1, 2, 8, 16), "block: 1 layer token dim")) for fmt in ("KV_MLA_FMT", "KV_2LTD")),
    Row("a pool of latents", noise(3, 2, 8, 16),
        lambda m: lmcache.describe(m, object_format="KV_MLA_FMT", part="index"), "b l t", "block layer token dim",
        tokens=8, parts="index",
        same=(lambda m: lmcache.describe(m[:, None], object_format="KV_MLA_FMT", part="index"),)),
    Row("K and V packed in one plane", noise(3, 1, 2, 8, 2 * 2 * 6), lambda m: lmcache.describe(list(m), heads=2),
        "b 0 l t 12h+6p:6", "block: 1 layer token (head kv dim)", **CHUNK),
    layerwise("KV_T2D", (8, 2, 16), "l b t p 8h:8", notation="layer block: token kv (head dim)", **CHUNK),
    layerwise("KV_2TD", (2, 8, 16), "l b p t 8h:8", notation="layer block: kv token (head dim)", **CHUNK),
    layerwise("KV_MLA_FMT", (8, 16), "l b t", notation="layer block: token dim", tokens=8),
    Row("kernel groups of two shapes", [noise(2 * 2 * 8 * 16 + 2 * 3 * 8 * 32) for _ in "012"],
        lambda m: KVLayout.merge([lmcache.describe(objects(m, (2, 2, 8, 16), (2, 3, 8, 32)), heads=heads, group=group,
                    layers=layers) for group, heads, layers in ((0, 2, [0, 4]), (1, 2, [1, 2, 3]))]),
        lambda m, l, p, b, t, h: m[b][256 * p + 128 * (l // 4) + 16 * t + 8 * h :][:8] if l in {0, 4}
        else m[b][512 + 768 * p + 256 * (l - 1) + 32 * t + 16 * h :][:16], "block: kv layer token (head dim)",
        layers=(0, 1, 2, 3, 4), **CHUNK),
    Row("an indexer's blocks in a chunk", [noise(2, 256, 132, kind=np.uint8) for _ in "012"],
        lambda m: lmcache.describe(m, opaque_tokens=64, part="index"), "b l 64t:64",
        "block: layer (subblock dim.0) dim.1", parts="index"),
    Row("a default chunk", [noise(2, 3, 256, 256)], lambda m: lmcache.describe(m, heads=2), "0 p l t 128h:128",
        "block: kv layer token (head dim)", blocks=1, tokens=256, layers=(0, 1, 2)),
]  # fmt: skip

SIZES = {"tokens_per_block": 4, "num_kv_heads": 2}
FOLDED = "block layer kv (head token dim)"


class Manager(SimpleNamespace):
    """What describe reads of a KVCacheManager of version 1: numbers of layers -> places in the pool."""

    def get_buffers(self, layer_idx, kv_layout="NHD"):
        data = self.pool[:, self.layer_offsets[layer_idx]]
        return data.reshape(3, 2, *((4, 2) if kv_layout == "NHD" else (2, 4)), 8)


def manager(pool):
    return Manager(pool=pool, layer_offsets={7: 1, 3: 0}, impl=SimpleNamespace(get_primary_pool_data=None))


TENSORRT = [
    *(Row(f"folded {order}", noise(3, 2, 2, 64),
        lambda m, order=order: tensorrt_llm.describe(m, kv_layout=order, layers=[3, 7], head_start=2, **SIZES), index,
        f"block layer kv ({inside})", layers=(3, 7), heads=range(2, 4),
        same=(lambda m, order=order, shape=shape: tensorrt_llm.describe(m.reshape(3, 2, 2, *shape), kv_layout=order,
                layers=[3, 7], head_start=2),
            lambda m, order=order: tensorrt_llm.describe(manager(m), kv_layout=order, head_start=2),
            lambda m, order=order, shape=shape: tensorrt_llm.describe([m[:, k].reshape(3, 2, *shape) for k in (0, 1)],
                kv_layout=order, layers=[3, 7], head_start=2),
                lambda m, order=order: tensorrt_llm.describe([m[:, 0], m[:, 1]], kv_layout=order, layers=[3, 7],
                head_start=2, **SIZES)))
        for order, shape, inside, index in (("HND", (2, 4, 8), "head token dim", "b l p 32h+8t:8"),
        ("NHD", (4, 2, 8), "token head dim", "b l p 16t+8h:8"))),
    Row("HND by default", noise(3, 2, 2, 64), lambda m: tensorrt_llm.describe(m, layer_start=4, **SIZES),
        "b l p 32h+8t:8", FOLDED, layers=(4, 5)),
    Row("unfolded", noise(3, 2, 2, 2, 4, 8), tensorrt_llm.describe, "b l p h t", "block layer kv head token dim"),
    Row("MLA", noise(3, 2, 1, 4 * 576), lambda m: tensorrt_llm.describe(m, tokens_per_block=4, num_kv_heads=1),
        "b l 0 576t:576", "block layer 1 (head token dim)", **LATENT),
    Row("views a layer", per_layer(3, 2, 2, 4, 8), lambda m: tensorrt_llm.describe(m, layers=[3, 9]), "l b p h t",
        "layer: block kv head token dim", layers=(3, 9)),
    Row("scales and index keys",
        [noise(3, 2, 2, 64, kind=np.int8), noise(3, 2, 2, 8, kind=np.uint8), noise(3, 2, 1, 4 * 132, kind=np.uint8)],
        lambda m: KVLayout.merge([tensorrt_llm.describe(m[0], **SIZES),
                tensorrt_llm.describe(m[1], part="scale", **SIZES),
                tensorrt_llm.describe(m[2], part="index", whole_blocks=True)]),
        "0 b l 0 32h+8t:8 | 0 b l 1 32h+8t:8 | 1 b l 0 4h+t:1 | 1 b l 1 4h+t:1 | 2 b l 0",
        f"{FOLDED} + block layer 1 dim", parts="k v k_scale v_scale index"),
    Row("opaque scales", noise(3, 2, 2, 2, 4, 8, kind=np.uint8),
        lambda m: tensorrt_llm.describe(m, part="scale", whole_blocks=True), "b l p",
        "block layer kv dim.0 dim.1 dim.2", parts="k_scale v_scale"),
    Row("slots", noise(3, 4_096, kind=np.uint8), lambda m: tensorrt_llm.describe(m, layers=[2]), "b", "block dim",
        layers=(2,), parts="slot", same=(lambda m: tensorrt_llm.describe(m, layer_start=2),)),
    Row("slots of two sizes", [noise(3, 4_096, kind=np.uint8), noise(3, 96, kind=np.uint8)], tensorrt_llm.describe,
        "p b", "block dim", parts="slot_0 slot_1"),
    Row("slots with names", [noise(3, 96, kind=np.uint8), noise(3, 32, kind=np.uint8)],
        lambda m: tensorrt_llm.describe(m, part="swa"), "p b", "block dim", parts="swa_0 swa_1"),
    Row("one pool of slots with a name", [noise(3, 96, kind=np.uint8)], lambda m: tensorrt_llm.describe(m, part="swa"),
        "0 b", "block dim", parts="swa"),
]  # fmt: skip


def paged_cache(tensor):
    """What describe reads of transformers' PagedAttentionCache: layers 1 and 4 of 4 tokens, 2 heads of 8."""
    kind = np.dtype(np.int16)
    if not isinstance(tensor, np.ndarray):
        import torch

        kind = torch.bfloat16
    full = SimpleNamespace(
        layer_indices=[1, 4], tokens_per_page=4, num_key_value_heads=2, head_dim=8, cache_dtype=kind,
        bytes_per_page=256, bytes_per_block=512,
    )  # fmt: skip
    return SimpleNamespace(cache_tensor=tensor, cache_allocators={"full_attention": full})


TRANSFORMERS = [
    Row("a rank's heads", noise(3 * 512, kind=np.uint8), lambda m: transformers.describe(paged_cache(m), head_start=6),
        lambda m, l, p, b, t, h: m[512 * b + 256 * l + 128 * p + 32 * t + 16 * h :][:16].view(np.int16),
        "block layer kv token head dim", layers=(1, 4), heads=range(6, 8),
        same=(lambda m: transformers.describe(paged_cache(m), group="full_attention", head_start=6),)),
]  # fmt: skip

# KV heads x head dim and kind -> bytes of 16 tokens, K and V, at TP 1, 2, 4 and 8.
PUBLISHED = {
    "8 x 128 bf16": (128, np.int16, (65_536, 32_768, 16_384, 8_192)),
    "8 x 128 fp8": (128, np.int8, (32_768, 16_384, 8_192, 4_096)),
    "gpt-oss 8 x 64 bf16": (64, np.int16, (32_768, 16_384, 8_192, 4_096)),
}
# Of n heads of d: the shape of two blocks of one layer, and the call.
SHAPES = {
    "flash_attention": (lambda n, d: (2, 2, 16, n, d), lambda m, n: flash_attention.describe(m)),
    "flashinfer": (lambda n, d: (2, 2, n, 16, d), lambda m, n: flashinfer.describe(m, kv_layout="HND")),
    "vllm": (lambda n, d: (2, n, 16, 2 * d), lambda m, n: vllm.describe(m)),
    "sglang": (lambda n, d: (2, 32, 1, n, d), lambda m, n: sglang.describe(m, layout="page_first", page_size=16)),
    "lmcache": (lambda n, d: (2, 2, 1, 16, n * d), lambda m, n: lmcache.describe(m, heads=n)),
    "flexkv": (lambda n, d: (2, 1, 2, 16, n, d), lambda m, n: flexkv.describe(m, "BLOCKFIRST")),
    "tensorrt_llm": (
        lambda n, d: (2, 1, 2, n * 16 * d),
        lambda m, n: tensorrt_llm.describe(m, tokens_per_block=16, num_kv_heads=n),
    ),
}

ROWS = named({"flexkv": FLEXKV, "lmcache": LMCACHE, "tensorrt_llm": TENSORRT, "transformers": TRANSFORMERS})
