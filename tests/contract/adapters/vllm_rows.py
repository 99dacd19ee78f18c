"""Rows of vllm: storage orders, pads, kernel blocks, and every form of a layer's tensor."""

import numpy as np

from kvplan import KVLayout
from kvplan.backends import vllm
from tests.contract.adapters.rows import Row, named, noise, per_layer

FUSED = "layer: block head token (kv dim)"
LATENT = {"parts": "kv", "heads": range(1)}
BYTES = {"kind": np.uint8}
EXTENTS = {"L": 2, "B": 3, "H": 2, "N": 4, "C": 16}


def views(m, order):
    """As the engine makes them: a storage tensor in one order, permuted."""
    stored = m.reshape([EXTENTS[axis] for axis in order])
    places = [order.index(axis) for axis in "LBHNC"]
    return stored.transpose(places) if isinstance(m, np.ndarray) else stored.permute(places)


def orders(order):
    """One allocation in a storage order, from byte 40 on."""
    raw = noise(808, **BYTES)[40:]
    return Row(order, raw, lambda m: vllm.describe(views(m, order), head_start=6),
               lambda m, l, p, b, t, h: views(m, order)[l, b, h, t, 8 * p :][:8], FUSED, heads=range(6, 8),
               same=(lambda m: vllm.describe({f"model.layers.{k}.attn": views(m, order)[k] for k in (1, 0)},
                                             head_start=6),))  # fmt: skip


CPU = [
    Row("cpu", noise(3, 2, 32, 64), lambda m: vllm.describe([m], form="cpu", head_start=4), "b h",
        "layer: block head dim.0 dim.1", parts="kv", heads=range(4, 6)),
    Row("cpu, the manager's blocks", noise(6, 2, 32, 64, **BYTES),
        lambda m: vllm.describe([m], form="cpu", block_tokens=64), "2b+t h", "layer: (block subblock) head dim.0 dim.1",
        tokens=2, parts="kv"),
    Row("planes_hnd", noise(2, 3, 2, 32, 16), lambda m: vllm.describe([m], form="planes_hnd", head_start=4), "p b h",
        "layer: kv block head dim.0 dim.1", heads=range(4, 6)),
    Row("planes_hnd, the manager's blocks", noise(2, 6, 2, 32, 16),
        lambda m: vllm.describe([m], form="planes_hnd", block_tokens=64), "p 2b+t h",
        "layer: kv (block subblock) head dim.0 dim.1", tokens=2),
]  # fmt: skip

KEYS, VALUES = "layer: block (head dim.0 token dim.1)", "layer: block (head dim token)"
SHUFFLED = "layer: block (head token.0 dim token.1)"


def x_at(side, form, x, p, t, h):
    """K (H, D / x, N, x), V (H, D, N), or shuffled (H, N / x, D, x), where x is 16 bytes."""
    if not p:
        return side.reshape(2, 32 // x, 16, x)[h, :, t]
    shuffled = form.startswith("shuffled")
    return side.reshape(2, 16 // x, 32, x)[h, t // x, :, t % x] if shuffled else side.reshape(2, 32, 16)[h, :, t]


def x_packed(form, kind):
    """3 blocks of 16 tokens, 2 heads x 32."""
    x = 16 // np.dtype(kind).itemsize
    return Row(f"{form} {np.dtype(kind).name}", noise(3, 2, 16, 64, kind=kind),
               lambda m: vllm.describe([m], form=form, heads=2),
               lambda m, l, p, b, t, h: x_at(m[b, p], form, x, p, t, h),
               f"{KEYS} + {SHUFFLED if form == 'shuffled' else VALUES}", layers=(0,), tokens=16)  # fmt: skip


def x_packed_planes(form, kind):
    """The same in planes: the shape shows the heads."""
    x = 16 // np.dtype(kind).itemsize
    return Row(f"{form} {np.dtype(kind).name}", noise(2, 3, 16, 2, 32, kind=kind),
               lambda m: vllm.describe([m], form=form, head_start=4),
               lambda m, l, p, b, t, h: x_at(m[p, b], form, x, p, t, h),
               f"{KEYS} + {SHUFFLED if form.startswith('shuffled') else VALUES}", layers=(0,), tokens=16,
               heads=range(4, 6))  # fmt: skip


X_PACKED = [
    *(x_packed_planes(form, kind) for form in ("rocm", "shuffled_planes") for kind in (np.int16, np.int8)),
    Row("rocm, the manager's blocks", noise(2, 6, 16, 2, 32),
        lambda m: vllm.describe([m], form="rocm", block_tokens=32),
        lambda m, l, p, b, t, h: x_at(m[p, 2 * b + t // 16], "rocm", 8, p, t % 16, h),
        "layer: (block token.0) (head dim.0 token.1 dim.1) + layer: (block token.0) (head dim token.1)", layers=(0,),
        tokens=32),
    *(x_packed(form, kind) for form in ("paged", "shuffled") for kind in (np.int16, np.int8)),
    *(Row(f"{form}, the manager's blocks", noise(6, 2, 16, 64),
        lambda m, form=form: vllm.describe([m], form=form, block_tokens=32, heads=2),
        lambda m, l, p, b, t, h, form=form: x_at(m[2 * b + t // 16, p], form, 8, p, t % 16, h),
        "layer: (block token.0) (head dim.0 token.1 dim.1) + " + v, layers=(0,), tokens=32)
        for form, v in (("paged", "layer: (block token.0) (head dim token.1)"),
        ("shuffled", "layer: (block token.0) (head token.1 dim token.2)"))),
]  # fmt: skip

# Before 0.33: form -> shape, K or V of a token in a kernel block, its notation, and that in the manager's blocks.
OLDER = {
    "planes": (lambda n: (2, n, 4, 2, 8), lambda m, p, b, t, h: m[p, b, t, h], "layer: kv block token head dim",
               "layer: kv (block token.0) token.1 head dim"),
    "pages": (lambda n: (n, 2, 4, 2, 8), lambda m, p, b, t, h: m[b, p, t, h], "layer: block kv token head dim",
              "layer: (block token.0) kv token.1 head dim"),
    "fused": (lambda n: (n, 2, 4, 16), lambda m, p, b, t, h: m[b, h, t, 8 * p :][:8], FUSED,
              "layer: (block token.0) head token.1 (kv dim)"),
    "head_slots": (lambda n: (n, 2, 4, 16), lambda m, p, b, t, h: m[b, p, t, 8 * h :][:8],
                   "layer: block kv token (head dim)", "layer: (block token.0) kv token.1 (head dim)"),
}  # fmt: skip
HEADS = {"head_slots": {"heads": 2}}

FORMS = [
    *(Row(form, per_layer(*shape(3)),
        lambda m, form=form: vllm.describe(m, form=form, head_start=2, layer_start=40, **HEADS.get(form, {})),
        lambda m, l, p, b, t, h, at=at: at(m[l], p, b, t, h), notation, layers=(40, 41), heads=range(2, 4))
        for form, (shape, at, notation, _) in OLDER.items()),
    *(Row(f"{form}, the manager's blocks", noise(*shape(6)),
        lambda m, form=form: vllm.describe([m], form=form, block_tokens=8, **HEADS.get(form, {})),
        lambda m, l, p, b, t, h, at=at: at(m, p, 2 * b + t // 4, t % 4, h), notation, layers=(0,), tokens=8)
        for form, (shape, at, _, notation) in OLDER.items()),
    *(Row(f"{form} in HND storage", noise(*shape), lambda m, form=form: vllm.describe([m.swapaxes(2, 3)], form=form),
        at, OLDER[form][2], layers=(0,)) for form, shape, at in (("planes", (2, 3, 2, 4, 8), "p b h t"),
        ("pages", (3, 2, 2, 4, 8), "b p h t"))),
    Row("head_slots in LHBNC", noise(2, 3, 4, 16),
        lambda m: vllm.describe([m.swapaxes(0, 1)], form="head_slots", heads=2), "p b t 8h:8",
        "layer: block kv token (head dim)"),
    Row("fused, V of another size", noise(2, 3, 4, 2, 6), lambda m: vllm.describe(m.swapaxes(2, 3), head_size_v=2),
        "l b t h :4 | l b t h 4:2", "layer: block head token dim"),
    Row("fused, V of half the size", noise(2, 3, 2, 4, 6), lambda m: vllm.describe(m, head_size_v=3), "l b h t 3p:3",
        "layer: block head token dim", same=(vllm.describe,)),
    Row("latent", per_layer(3, 1, 4, 576), lambda m: vllm.describe(m, form="latent", layers=[3, 4]), "l b 0 t",
        "layer: block 1 token dim", layers=(3, 4), same=(lambda m: vllm.describe(m, head_size_v=0, layers=[3, 4]),)),
    *(Row(f"latent of 64 tokens of {row} bytes", noise(2, 1, 64, row, **BYTES),
        lambda m: vllm.describe([m], form="latent"), "b 0 t", "layer: block 1 token dim", blocks=2, tokens=64)
        for row in (1152, 576, 656, 352, 528, 584)),
    *(Row(f"scales in rows of {row} bytes", noise(2, 8, 16, row, **BYTES), lambda m: vllm.describe([m]),
        f"b h t {row // 2}p:{row // 2}", FUSED, layers=(0,), blocks=2, tokens=16, heads=range(8)) for row in (264,
        136)),
    *(Row(f"packed rows of {row} bytes", noise(2, 8, 16, row, **BYTES),
        lambda m: vllm.describe([m], form="packed", head_start=8), "b h t", "layer: block head token dim", blocks=2,
        tokens=16, parts="kv", heads=range(8, 16)) for row in (196, 134, 118, 102)),
    Row("whole blocks", per_layer(3, 1, 64, 144, **BYTES),
        lambda m: vllm.describe(m, form="whole_blocks", part="index"), "l b", "layer: block dim.0 dim.1 dim.2",
        parts="index"),
    Row("whole blocks of a kernel", noise(6, 1, 16, 24, **BYTES),
        lambda m: vllm.describe([m], form="whole_blocks", block_tokens=32, part="index"), "2b+t",
        "layer: (block subblock) dim.0 dim.1 dim.2", tokens=2, parts="index"),
    Row("whole blocks of a kernel of one size", noise(3, 1, 16, 24, **BYTES),
        lambda m: vllm.describe([m], form="whole_blocks", block_tokens=16), "b", "layer: block dim.0 dim.1 dim.2"),
    Row("latents of a kernel beside whole blocks", [noise(12, 1, 16, 32), noise(12, 1, 16, 24, **BYTES)],
        lambda m: KVLayout.merge([vllm.describe([m[0]], form="latent", block_tokens=64),
                vllm.describe([m[1]], form="whole_blocks", block_tokens=64, part="index")]),
        lambda m, l, p, b, t, h: m[1][4 * b + t] if p else m[0][4 * b + t // 16, 0, t % 16],
        "layer: (block token.0) 1 token.1 dim + layer: (block subblock) dim.0 dim.1 dim.2", layers=(0,), tokens=64,
        parts="kv index"),
    Row("a latent and its indexer",
        {"model.layers.3.attn": noise(3, 1, 64, 656, **BYTES), "model.layers.3.indexer": noise(3, 1, 64, 132, **BYTES)},
        lambda m: KVLayout.merge([vllm.describe(m, form="latent", names=["model.layers.3.attn"]),
                vllm.describe(m, form="whole_blocks", names=["model.layers.3.indexer"], part="index")]),
        lambda m, l, p, b, t, h: m["model.layers.3.indexer"][b] if p else m["model.layers.3.attn"][b, 0, t],
        "layer: block 1 token dim + layer: block dim.0 dim.1 dim.2", layers=(3,), tokens=64, parts="kv index"),
]  # fmt: skip


def padded(m):
    """Layers of padded pages: 128 bytes in 160."""
    return m.reshape(2, 3, 160)[..., :128].reshape(2, 3, 2, 4, 16)


def beside(m):
    """Layers 1, 0 and 2 beside one another in each block: one of two heads, two of one head."""
    blocks = m.reshape(3, 256)
    pieces = (blocks[:, :128], blocks[:, 128:192], blocks[:, 192:])
    return {f"layers.{k}.attn": piece.reshape(3, -1, 4, 16) for k, piece in zip((1, 0, 2), pieces, strict=True)}


PLACED = [
    *map(orders, ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")),
    Row("padded pages, layers outside", noise(960, **BYTES), lambda m: vllm.describe(padded(m)),
        lambda m, l, p, b, t, h: padded(m)[l, b, h, t, 8 * p :][:8], FUSED),
    Row("padded pages, blocks outside", noise(1_152, **BYTES),
        lambda m: vllm.describe([m.reshape(3, 384)[:, 160 * k :][:, :128].reshape(3, 2, 4, 16) for k in (0, 1)]),
        "384b+160l+64h+16t+8p:8", FUSED),
    Row("padded states", noise(2, 3, 1, 1, 512, **BYTES),
        lambda m: vllm.describe(m[..., :400], form="whole_blocks", part="state"), "l b 0 0 :400",
        "layer: block dim.0 dim.1 dim.2", parts="state"),
    Row("DeepSeek-V4's pad", noise(3, 37_440, **BYTES),
        lambda m: vllm.describe([m[:, :37_376].reshape(3, 1, 64, 584)], form="whole_blocks"), "b :37376",
        "layer: block dim.0 dim.1 dim.2"),
    Row("layers of two shapes", noise(768, **BYTES), lambda m: vllm.describe(beside(m)),
        lambda m, l, p, b, t, h: m[256 * b + (128, 0, 192)[l] + 64 * h + 16 * t + 8 * p :][:8], FUSED,
        layers=(0, 1, 2)),
    Row("layers that share a cache", {"layers.5.attn": noise(3, 2, 4, 16), "layers.10.attn": noise(3, 2, 4, 16)},
        lambda m: vllm.describe({**m, "layers.7.attn": m["layers.5.attn"]}),
        lambda m, l, p, b, t, h: m[f"layers.{(5, 10)[l]}.attn"][b, h, t, 8 * p :][:8], FUSED, layers=(5, 10)),
    Row("layers with two numbers", {f"layers.0.self_attn.{k}": noise(3, 2, 4, 16) for k in (9, 8)},
        lambda m: vllm.describe(m, layers=[1, 0]),
        lambda m, l, p, b, t, h: m[f"layers.0.self_attn.{8 + l}"][b, h, t, 8 * p :][:8], FUSED),
    Row("eighty layers, interleaved", noise(2, 2, 80, 4, 16, **BYTES),
        lambda m: vllm.describe([m[:, :, k] for k in range(80)]), "b h l t 8p:8", FUSED, blocks=2,
        layers=tuple(range(80))),
]  # fmt: skip

ROWS = named({"vllm": [*PLACED, *FORMS, *X_PACKED, *CPU]})
