"""Rows of vllm: storage orders, pads, kernel blocks, and every form of a layer's tensor."""

import numpy as np

from kvplan import KVLayout
from kvplan.backends import vllm
from tests.contract.adapters.rows import Row, named, noise, per_layer

FUSED = "layer: block head token (kv dim)"
LATENT = {"parts": "kv", "heads": range(1)}
BYTES = {"kind": np.uint8}
EXTENTS = {"L": 2, "B": 3, "H": 2, "N": 4, "C": 16}
SIZES = {"layers": 2, "blocks": 3, "heads": 2, "tokens": 4, "row_nbytes": 16}


def views(m, order):
    """As the engine makes them: a storage tensor in one order, permuted."""
    stored = m.reshape([EXTENTS[axis] for axis in order])
    places = [order.index(axis) for axis in "LBHNC"]
    return stored.transpose(places) if isinstance(m, np.ndarray) else stored.permute(places)


def orders(order):
    """The same bytes by views of a permuted tensor, and by vLLM's strides."""
    raw = noise(808, **BYTES)[40:]
    options = {**SIZES, "order": order}
    return Row(order, raw, lambda m: vllm.describe(views(m, order), head_start=6),
               lambda m, l, p, b, t, h: views(m, order)[l, b, h, t, 8 * p :][:8], 256, FUSED, heads=range(6, 8),
               same=(lambda m: vllm.describe(vllm.place(m, **options), head_start=6),
                     lambda m: vllm.describe({f"model.layers.{k}.attn": views(m, order)[k] for k in (1, 0)},
                                             head_start=6)))  # fmt: skip


def placed(m, **options):
    return vllm.describe(vllm.place(m, **{**SIZES, **options}))


# isa, version -> K and V of one (block, head) from the rows (token, dim) that they hold.
X = "vec", "vec16", "rvv", "vxe", "vsx", "neon_fmla"
PACKINGS = {
    **{(isa, None): (lambda k, t: k.reshape(32, 32)[:, t], lambda v, t: v.reshape(32, 32)[t]) for isa in X},
    ("amx", None): (lambda k, t: k.reshape(2, 16, 16, 2)[t // 16, :, t % 16],
                    lambda v, t: v.reshape(2, 16, 16, 2)[:, t // 2, :, t % 2]),
    ("neon_bfmmla", "0.33.0"): (lambda k, t: k.reshape(4, 8, 8, 4)[t // 8, :, t % 8],
                                lambda v, t: v.reshape(4, 8, 8, 4)[:, t // 4, :, t % 4]),
    ("neon_bfmmla", "0.30.0"): (lambda k, t: k.reshape(4, 8, 8, 4)[t // 8, :, t % 8],
                                lambda v, t: v.reshape(16, 8, 2, 4)[:, t // 4, :, t % 4]),
}  # fmt: skip
PACKED = {
    "vec": ("dim token", "token dim"),
    "amx": ("token.0 dim.0 token.1 dim.1", "dim.0 token.0 dim.1 token.1"),
}


def cpu(form, isa, version, kind=np.int16):
    """3 blocks, 2 heads, 32 tokens, 32 dims: K and V beside each other in a (block, head), or in planes."""
    sides = PACKINGS[isa, version]
    k_axes, v_axes = PACKED["vec" if isa in X else "amx"]
    fused = form == "cpu"
    shape = (3, 2, 32, 64) if fused else (2, 3, 2, 32, 32)

    def index(m, l, p, b, t, h):
        held = m.reshape(3, 2, 2, 1024)[b, h, p] if fused else m.reshape(2, 3, 2, 1024)[p, b, h]
        return sides[p](held, t)

    return Row(f"{form} {isa} {version or ''} {np.dtype(kind).name}", noise(*shape, kind=kind),
               lambda m: vllm.describe([m], form=form, isa=isa, version=version), index,
               4_096 * np.dtype(kind).itemsize,
               f"layer: block head ({k_axes}) + layer: block head ({v_axes})", layers=(0,), tokens=32)  # fmt: skip


MANAGER = "layer: (block token.0)"
CPU = [
    *(cpu("cpu", isa, version) for isa, version in PACKINGS),
    *(cpu("planes_hnd", isa, version) for isa, version in PACKINGS if version != "0.33.0"),
    cpu("cpu", "amx", None, kind=np.uint8),
    Row("cpu, not known", noise(3, 2, 32, 64, **BYTES), lambda m: vllm.describe([m], form="cpu"),
        lambda m, l, p, b, t, h: m.reshape(3, 2, 2, 1024)[b, h, p], 4_096, "layer: block head dim", layers=(0,),
        tokens=1),
    Row("planes_hnd, not known", noise(2, 3, 2, 32, 32, **BYTES), lambda m: vllm.describe([m], form="planes_hnd"),
        lambda m, l, p, b, t, h: m[p, b, h], 4_096, "layer: block head dim", layers=(0,), tokens=1),
    *(Row(f"cpu {isa}, the manager's blocks", noise(6, 2, 32, 64),
          lambda m, isa=isa: vllm.describe([m], form="cpu", isa=isa, block_tokens=64),
          lambda m, l, p, b, t, h, sides=PACKINGS[isa, None]: sides[p](
              m.reshape(6, 2, 2, 1024)[2 * b + t // 32, h, p], t % 32),
          16_384, notation, layers=(0,), tokens=64)
      for isa, notation in (
          ("vec", f"{MANAGER} head (dim token.1) + {MANAGER} head (token.1 dim)"),
          ("amx", f"{MANAGER} head (token.1 dim.0 token.2 dim.1) + {MANAGER} head (dim.0 token.1 dim.1 token.2)"))),
]  # fmt: skip

KEYS, VALUES = "layer: block (head dim.0 token dim.1)", "layer: block (head dim token)"
SHUFFLED = "layer: block (head token.0 dim token.1)"
# form -> shape of 3 blocks, 16 tokens, 2 heads x 32; K or V of a block
X_FORMS = {
    "paged": ((3, 2, 16, 64), lambda m, p, b: m[b, p]),
    "shuffled": ((3, 2, 16, 64), lambda m, p, b: m[b, p]),
    "rocm": ((2, 3, 16, 2, 32), lambda m, p, b: m[p, b]),
    "shuffled_planes": ((2, 3, 16, 2, 32), lambda m, p, b: m[p, b]),
    "paged_planes": ((2, 3, 1024), lambda m, p, b: m[p, b]),
}


def x_at(side, form, x, p, t, h):
    """K (H, D / x, N, x), V (H, D, N), or shuffled (H, N / x, D, x), where x is 16 bytes."""
    if not p:
        return side.reshape(2, 32 // x, 16, x)[h, :, t]
    return (
        side.reshape(2, 16 // x, 32, x)[h, t // x, :, t % x] if "shuffled" in form else side.reshape(2, 32, 16)[h, :, t]
    )


def x_packed(form, kind):
    (shape, page), x = X_FORMS[form], 16 // np.dtype(kind).itemsize
    told = {"version": "0.26.0"} if form == "rocm" else {} if len(shape) == 5 else {"heads": 2}
    told |= {"block_tokens": 16} if form == "paged_planes" else {}
    later = (lambda m: vllm.describe([m], form="rocm", version="0.29.0", heads=2),
             lambda m: vllm.describe([m], form="rocm", version="0.33.0", heads=2))  # fmt: skip
    return Row(f"{form} {np.dtype(kind).name}", noise(*shape, kind=kind),
               lambda m: vllm.describe([m], form=form, **told),
               lambda m, l, p, b, t, h: x_at(page(m, p, b), form, x, p, t, h), 2_048 * np.dtype(kind).itemsize,
               f"{KEYS} + {SHUFFLED if 'shuffled' in form else VALUES}", layers=(0,), tokens=16,
               same=later if form == "paged" else ())  # fmt: skip


X_PACKED = [
    *(x_packed(form, kind) for form in X_FORMS for kind in (np.int16, np.int8)),
    *(Row(f"{form}, the manager's blocks", noise(*shape),
          lambda m, form=form, told=told: vllm.describe([m], form=form, block_tokens=32, **told),
          lambda m, l, p, b, t, h, page=X_FORMS[form][1], form=form: x_at(
              page(m, p, 2 * b + t // 16), form, 8, p, t % 16, h),
          8_192, "layer: (block token.0) (head dim.0 token.1 dim.1) + " + v, layers=(0,), tokens=32)
      for form, shape, told, v in (
          ("paged", (6, 2, 16, 64), {"heads": 2}, "layer: (block token.0) (head dim token.1)"),
          ("shuffled", (6, 2, 16, 64), {"heads": 2}, "layer: (block token.0) (head token.1 dim token.2)"),
          ("rocm", (2, 6, 16, 2, 32), {"version": "0.28.0"}, "layer: (block token.0) (head dim token.1)"))),
]  # fmt: skip

# Before 0.33: form -> shape, K or V of a token in a kernel block, its notation, and that in the manager's blocks.
OLDER = {
    "planes": (lambda n: (2, n, 4, 2, 8), lambda m, p, b, t, h: m[p, b, t, h], "layer: kv block token head dim",
               "layer: kv (block token.0) token.1 head dim"),
    "pages": (lambda n: (n, 2, 4, 2, 8), lambda m, p, b, t, h: m[b, p, t, h], "layer: block kv token head dim",
              "layer: (block token.0) kv token.1 head dim"),
    "rows": (lambda n: (n, 4, 2, 16), lambda m, p, b, t, h: m[b, t, h, 8 * p :][:8], "layer: block token head (kv dim)",
             "layer: (block token.0) token.1 head (kv dim)"),
    "fused": (lambda n: (n, 2, 4, 16), lambda m, p, b, t, h: m[b, h, t, 8 * p :][:8], FUSED,
              "layer: (block token.0) head token.1 (kv dim)"),
    "head_slots": (lambda n: (n, 2, 4, 16), lambda m, p, b, t, h: m[b, p, t, 8 * h :][:8],
                   "layer: block kv token (head dim)", "layer: (block token.0) kv token.1 (head dim)"),
}  # fmt: skip
HEADS = {"head_slots": {"heads": 2}}

FORMS = [
    *(Row(form, per_layer(*shape(3)),
          lambda m, form=form: vllm.describe(m, form=form, head_start=2, layer_start=40, **HEADS.get(form, {})),
          lambda m, l, p, b, t, h, at=at: at(m[l], p, b, t, h), 512, notation, layers=(40, 41), heads=range(2, 4))
      for form, (shape, at, notation, _) in OLDER.items()),
    *(Row(f"{form}, the manager's blocks", noise(*shape(6)),
          lambda m, form=form: vllm.describe([m], form=form, block_tokens=8, **HEADS.get(form, {})),
          lambda m, l, p, b, t, h, at=at: at(m, p, 2 * b + t // 4, t % 4, h), 512, notation, layers=(0,), tokens=8)
      for form, (shape, at, _, notation) in OLDER.items()),
    *(Row(f"{form} in HND storage", noise(*shape), lambda m, form=form: vllm.describe([m.swapaxes(2, 3)], form=form),
          at, 256, OLDER[form][2], layers=(0,))
      for form, shape, at in (("planes", (2, 3, 2, 4, 8), lambda m, l, p, b, t, h: m[p, b, h, t]),
                              ("pages", (3, 2, 2, 4, 8), lambda m, l, p, b, t, h: m[b, p, h, t]))),
    Row("head_slots in LHBNC", noise(2, 3, 4, 16),
        lambda m: vllm.describe([m.swapaxes(0, 1)], form="head_slots", heads=2),
        lambda m, l, p, b, t, h: m[p, b, t, 8 * h :][:8], 256, "layer: block kv token (head dim)", layers=(0,)),
    Row("fused, V of another size", noise(2, 3, 4, 2, 6), lambda m: vllm.describe(m.swapaxes(2, 3), head_size_v=2),
        lambda m, l, p, b, t, h: m[l, b, t, h, 4:] if p else m[l, b, t, h, :4], 192, "layer: block head token dim"),
    Row("fused, V of half the size", noise(2, 3, 2, 4, 6), lambda m: vllm.describe(m, head_size_v=3),
        lambda m, l, p, b, t, h: m[l, b, h, t, 3 * p :][:3], 192, "layer: block head token dim", same=(vllm.describe,)),
    Row("rows, V of another size", noise(3, 4, 2, 6), lambda m: vllm.describe([m], form="rows", head_size_v=2),
        lambda m, l, p, b, t, h: m[b, t, h, 4:] if p else m[b, t, h, :4], 96, "layer: block token head dim",
        layers=(0,)),
    Row("latent", per_layer(3, 1, 4, 576), lambda m: vllm.describe(m, form="latent", layers=[3, 4]),
        lambda m, l, p, b, t, h: m[l][b, 0, t], 9_216, "layer: block 1 token dim", layers=(3, 4),
        same=(lambda m: vllm.describe(m, head_size_v=0, layers=[3, 4]),), **LATENT),
    *(Row(f"latent of 64 tokens of {row} bytes", noise(2, 1, 64, row, **BYTES),
          lambda m: vllm.describe([m], form="latent"), lambda m, l, p, b, t, h: m[b, 0, t], nbytes,
          "layer: block 1 token dim", layers=(0,), blocks=2, tokens=64, **LATENT)
      for row, nbytes in ((1152, 73_728), (576, 36_864), (656, 41_984), (352, 22_528), (528, 33_792), (584, 37_376))),
    *(Row(f"scales in rows of {row} bytes", noise(2, 8, 16, row, **BYTES), lambda m: vllm.describe([m]),
          lambda m, l, p, b, t, h, half=row // 2: m[b, h, t, half * p :][:half], nbytes, FUSED, layers=(0,), blocks=2,
          tokens=16, heads=range(8))
      for row, nbytes in ((264, 33_792), (136, 17_408))),
    *(Row(f"packed rows of {row} bytes", noise(2, 8, 16, row, **BYTES),
          lambda m: vllm.describe([m], form="packed", head_start=8), lambda m, l, p, b, t, h: m[b, h, t], nbytes,
          "layer: block head token dim", layers=(0,), blocks=2, tokens=16, parts="kv", heads=range(8, 16))
      for row, nbytes in ((196, 25_088), (134, 17_152), (118, 15_104), (102, 13_056))),
    Row("whole blocks", per_layer(3, 1, 64, 144, **BYTES),
        lambda m: vllm.describe(m, form="whole_blocks", part="index"), lambda m, l, p, b, t, h: m[l][b], 18_432,
        "layer: block dim.0 dim.1 dim.2", tokens=1, parts="index", heads=range(1)),
    Row("whole blocks of a kernel", noise(6, 1, 16, 24, **BYTES),
        lambda m: vllm.describe([m], form="whole_blocks", block_tokens=32, part="index"),
        lambda m, l, p, b, t, h: m[2 * b + t], 768, "layer: (block subblock) dim.0 dim.1 dim.2", layers=(0,), tokens=2,
        parts="index", heads=range(1)),
    Row("whole blocks of a kernel of one size", noise(3, 1, 16, 24, **BYTES),
        lambda m: vllm.describe([m], form="whole_blocks", block_tokens=16), lambda m, l, p, b, t, h: m[b], 384,
        "layer: block dim.0 dim.1 dim.2", layers=(0,), tokens=1, **LATENT),
    Row("latents of a kernel beside whole blocks", [noise(12, 1, 16, 32), noise(12, 1, 16, 24, **BYTES)],
        lambda m: KVLayout.merge([vllm.describe([m[0]], form="latent", block_tokens=64),
                                  vllm.describe([m[1]], form="whole_blocks", block_tokens=64, part="index")]),
        lambda m, l, p, b, t, h: m[1][4 * b + t] if p else m[0][4 * b + t // 16, 0, t % 16], 5_632,
        "layer: (block token.0) 1 token.1 dim + layer: (block subblock) dim.0 dim.1 dim.2", layers=(0,), tokens=64,
        parts="kv index", heads=range(1)),
    Row("a latent and its indexer", {"model.layers.3.attn": noise(3, 1, 64, 656, **BYTES),
                                     "model.layers.3.indexer": noise(3, 1, 64, 132, **BYTES)},
        lambda m: KVLayout.merge([
            vllm.describe(m, form="latent", names=["model.layers.3.attn"]),
            vllm.describe(m, form="whole_blocks", names=["model.layers.3.indexer"], part="index")]),
        lambda m, l, p, b, t, h: m["model.layers.3.indexer"][b] if p else m["model.layers.3.attn"][b, 0, t], 50_432,
        "layer: block 1 token dim + layer: block dim.0 dim.1 dim.2", layers=(3,), tokens=64, parts="kv index",
        heads=range(1)),
    *(Row(f"no NVFP4: {shape} of {np.dtype(kind).name}", noise(3, *shape, kind=kind),
          lambda m: vllm.describe([m], form="whole_blocks"), lambda m, l, p, b, t, h: m[b], nbytes,
          "layer: block dim.0 dim.1 dim.2", layers=(0,), tokens=1, **LATENT)
      for shape, kind, nbytes in (((4, 4, 16), np.uint8, 256), ((3, 4, 18), np.uint8, 216), ((1, 4, 18), np.uint8, 72),
                                  ((4, 1, 18), np.uint8, 72), ((4, 4, 18), np.int16, 576))),
]  # fmt: skip


def padded(m):
    """Pages of 128 bytes in 160."""
    return m.reshape(6, 160)[:, :128].reshape(6, 2, 4, 16)


def kernel_blocks(order, kernel, at):
    """The manager's blocks of 8 tokens, each two blocks of the kernel of 4."""
    return Row(f"{order}, kernel blocks", noise(1_536, **BYTES),
               lambda m: vllm.describe(vllm.place(m, **{**SIZES, "tokens": 8}, order=order, kernel_tokens=4),
                                       block_tokens=8),
               lambda m, l, p, b, t, h: at(m.reshape(2, 6, *kernel, 16), l, 2 * b + t // 4, t % 4, h)[8 * p :][:8], 512,
               "layer: (block token.0) head token.1 (kv dim)", tokens=8)  # fmt: skip


# NVFP4, 16 + 2 bytes a row, 2 heads x 4 tokens: K data, K scales, V data, V scales; heads or tokens outside in each.
PARTS = ((0, 16), (128, 2), (144, 16), (272, 2))


def nvfp4_region(page, part, head, *, by_head):
    start, row = PARTS[part]
    region = page[start : start + 8 * row]
    return region.reshape(2, 4, row)[head] if by_head else region.reshape(4, 2, row)[:, head]


def nvfp4(order):
    options = {**SIZES, "heads": 4, "row_nbytes": 18, "order": order}

    def index(m, l, p, b, t, h):
        page = m.reshape(2, 3, 288)[l, b] if order.startswith("L") else m.reshape(3, 2, 288)[b, l]
        return nvfp4_region(page, p, h, by_head=order.endswith("HNC"))

    dims = "head dim.0 dim.1" if order.endswith("HNC") else "dim.0 head dim.1"
    return Row(f"NVFP4 in {order}", noise(1_728, **BYTES),
               lambda m: vllm.describe(vllm.place(m, **options), form="whole_blocks", head_start=6), index, 576,
               f"layer: block ({dims})", tokens=1, parts="k k_scale v v_scale", heads=range(6, 8))  # fmt: skip


PLACED = [
    *map(orders, ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")),
    Row("HND", noise(768, **BYTES), lambda m: placed(m, order="HND"),
        lambda m, l, p, b, t, h: m.reshape(2, 3, 2, 4, 16)[l, b, h, t, 8 * p :][:8], 256, FUSED, same=(placed,)),
    Row("NHD", noise(768, **BYTES), lambda m: placed(m, order="NHD"),
        lambda m, l, p, b, t, h: m.reshape(2, 3, 4, 2, 16)[l, b, t, h, 8 * p :][:8], 256, FUSED),
    Row("an offset", noise(808, **BYTES), lambda m: placed(m, offset=40, order="BHLNC"),
        lambda m, l, p, b, t, h: m[40:].reshape(3, 2, 2, 4, 16)[b, h, l, t, 8 * p :][:8], 256, FUSED),
    Row("padded pages, layers outside", noise(960, **BYTES), lambda m: placed(m, page_nbytes=160),
        lambda m, l, p, b, t, h: padded(m)[3 * l + b, h, t, 8 * p :][:8], 256, FUSED),
    Row("padded pages, blocks outside", noise(1_152, **BYTES),
        lambda m: placed(m, order="BLHNC", page_nbytes=160, block_stride=384),
        lambda m, l, p, b, t, h: m[384 * b + 160 * l + 64 * h + 16 * t + 8 * p :][:8], 256, FUSED),
    Row("a padded page of one head, LHBNC", noise(576, **BYTES),
        lambda m: placed(m, heads=1, page_nbytes=96, order="LHBNC"),
        lambda m, l, p, b, t, h: m.reshape(2, 3, 96)[l, b, 16 * t + 8 * p :][:8], 128, FUSED, heads=range(1),
        same=(lambda m: placed(m, heads=1, page_nbytes=96),)),
    Row("padded states", noise(3_072, **BYTES),
        lambda m: vllm.describe(vllm.place(m, layers=2, blocks=3, heads=1, tokens=1, row_nbytes=400, page_nbytes=512),
                                form="whole_blocks", part="state"),
        lambda m, l, p, b, t, h: m.reshape(2, 3, 512)[l, b, :400], 800, "layer: block dim.0 dim.1 dim.2", tokens=1,
        parts="state", heads=range(1)),
    Row("DeepSeek-V4's pad", noise(3 * 37_440, **BYTES),
        lambda m: vllm.describe(vllm.place(m, layers=1, blocks=3, heads=1, tokens=64, row_nbytes=584,
                                           page_nbytes=37_440), form="whole_blocks"),
        lambda m, l, p, b, t, h: m.reshape(3, 37_440)[b, :37_376], 37_376, "layer: block dim.0 dim.1 dim.2",
        layers=(0,), tokens=1, **LATENT),
    kernel_blocks("LBHNC", (2, 4), lambda m, l, b, t, h: m[l, b, h, t]),
    kernel_blocks("LBNHC", (4, 2), lambda m, l, b, t, h: m[l, b, t, h]),
    *map(nvfp4, ("LBHNC", "LBNHC", "BLHNC", "BLNHC")),
    Row("NVFP4, each layer by its own strides", per_layer(864, **BYTES),
        lambda m: vllm.describe([
            vllm.place(x, **SIZES | {"layers": 1, "heads": 4, "row_nbytes": 18}, order=order)[0]
            for x, order in zip(m, ("LBHNC", "LBNHC"), strict=True)], form="whole_blocks"),
        lambda m, l, p, b, t, h: nvfp4_region(m[l].reshape(3, 288)[b], p, h, by_head=l == 0), 576,
        "layer: block (head dim.0 dim.1) + layer: block (dim.0 head dim.1)", tokens=1, parts="k k_scale v v_scale"),
    Row("NVFP4 of another name", noise(864, **BYTES),
        lambda m: vllm.describe(m.reshape(3, 4, 4, 18), form="whole_blocks", part="draft"),
        lambda m, l, p, b, t, h: nvfp4_region(m.reshape(3, 288)[b], p, h, by_head=True), 288,
        "layer: block (head dim.0 dim.1)", layers=(0,), tokens=1,
        parts="k_draft k_draft_scale v_draft v_draft_scale"),
    Row("layers of two shapes", noise(768, **BYTES),
        lambda m: vllm.describe(dict(zip(
            ("layers.1.attn", "layers.0.attn", "layers.2.attn"),
            vllm.place(m, **SIZES | {"layers": 1}, order="BLHNC", block_stride=256)
            + vllm.place(m, **SIZES | {"heads": 1}, order="BLHNC", block_stride=256, offset=128), strict=True))),
        lambda m, l, p, b, t, h: m[256 * b + (128, 0, 192)[l] + 64 * h + 16 * t + 8 * p :][:8], 256, FUSED,
        layers=(0, 1, 2)),
    Row("layers that share a cache", {"layers.5.attn": noise(3, 2, 4, 16), "layers.10.attn": noise(3, 2, 4, 16)},
        lambda m: vllm.describe({**m, "layers.7.attn": m["layers.5.attn"]}),
        lambda m, l, p, b, t, h: m[f"layers.{(5, 10)[l]}.attn"][b, h, t, 8 * p :][:8], 512, FUSED, layers=(5, 10)),
    Row("layers with two numbers", {f"layers.0.self_attn.{k}": noise(3, 2, 4, 16) for k in (9, 8)},
        lambda m: vllm.describe(m, layers=[1, 0]),
        lambda m, l, p, b, t, h: m[f"layers.0.self_attn.{8 + l}"][b, h, t, 8 * p :][:8], 512, FUSED),
    Row("eighty layers, interleaved", noise(80 * 2 * 2 * 4 * 16, **BYTES),
        lambda m: vllm.describe(vllm.place(m, **SIZES | {"layers": 80, "blocks": 2}, order="BHLNC")),
        lambda m, l, p, b, t, h: m.reshape(2, 2, 80, 4, 16)[b, h, l, t, 8 * p :][:8], 10_240, FUSED, blocks=2,
        layers=tuple(range(80))),
]  # fmt: skip

GROUPS = {"vllm": [*PLACED, *FORMS, *X_PACKED, *CPU]}
ROWS = named(GROUPS)
