"""Rows of quantized: every row format as rows and as pages, and scales in tensors of their own."""

import numpy as np

from kvplan import KVLayout
from kvplan.backends import quantized
from tests.contract.adapters.rows import Row, named, noise

# Bytes a row; of a page of 64 rows (of 8 heads where there are heads, at head_dim 128); and of it with its padding.
NBYTES = {
    "fp8_ds_mla": (656, 41_984, 41_984),
    "nvfp4_ds_mla": (352, 22_528, 22_528),
    "deepseek_v41": (528, 33_792, 33_792),
    "deepseek_v41_nvfp4": (288, 18_432, 18_432),
    "int8_per_token_head_mla": (584, 37_376, 37_376),
    "int4_per_token_head_mla": (296, 18_944, 18_944),
    "deepseek_v4": (584, 37_376, 37_440),
    "deepseek_v41_split": (528, 33_792, 33_792),
    "deepseek_v41_nvfp4_split": (288, 18_432, 18_432),
    "indexer_fp8": (132, 8_448, 8_448),
    "indexer_mxfp4": (68, 4_352, 4_352),
    "int8_per_token_head": (264, 135_168, 135_168),
    "fp8_per_token_head": (264, 135_168, 135_168),
    "int4_per_token_head": (136, 69_632, 69_632),
    "turboquant_k8v4": (196, 100_352, 100_352),
    "turboquant_4bit_nc": (134, 68_608, 68_608),
    "turboquant_k3v4_nc": (118, 60_416, 60_416),
    "turboquant_3bit_nc": (102, 52_224, 52_224),
    "nvfp4": (144, 73_728, 73_728),
}
HEADED = list(NBYTES)[11:-1]
# Data and scales of a row, in regions of their own: all data of a page, then all scales.
REGIONS = {
    "deepseek_v4": (576, 8),
    "deepseek_v41_split": (512, 16),
    "deepseek_v41_nvfp4_split": (256, 32),
    "indexer_fp8": (128, 4),
    "indexer_mxfp4": (64, 4),
}
LATENT = {"parts": "kv", "heads": range(1)}
ONE = {"blocks": 2, "tokens": 64, "layers": (5,)}


def row_at(row, tokens=64, heads=1, *, order="NHD"):
    """Where rows of bytes stand in a page, one after the other."""

    def index(m, l, p, b, t, h):
        place = t * heads + h if order == "NHD" else h * tokens + t
        return m.reshape(len(m), -1)[b, place * row :][:row]

    return index


def region_at(name, tokens):
    """Where data and scales stand in a page."""
    data, scale = REGIONS[name]

    def index(m, l, p, b, t, h):
        return m[b, tokens * data + t * scale :][:scale] if p else m[b, t * data :][:data]

    return index


def nvfp4_at(tokens, heads, *, order="NHD"):
    """K data, K scales, V data, V scales of vLLM: 64 and 8 bytes a row."""
    rows = tokens * heads

    def index(m, l, p, b, t, h):
        place = t * heads + h if order == "NHD" else h * tokens + t
        start = (0, 64 * rows, 72 * rows, 136 * rows)[p]
        return m[b, start + place * (64, 8)[p % 2] :][: (64, 8)[p % 2]]

    return index


def pages(name):
    """Two pages of 64 rows."""
    row, nbytes, padded = NBYTES[name]
    told = {"block_tokens": 64, "layer_start": 5}
    notation = "layer: block (token dim)"
    if name in REGIONS:
        facts = {"parts": "kv kv_scale", "heads": range(1)}
        index = region_at(name, 64)
    elif name == "nvfp4" or name in HEADED:
        told |= {"num_kv_heads": 8, "head_start": 8}
        notation, facts = "layer: block (token head dim)", {"parts": "kv", "heads": range(8, 16)}
        index = row_at(row, heads=8)
        if name == "nvfp4":
            facts["parts"], index = "k k_scale v v_scale", nvfp4_at(64, 8)
    else:
        facts, index = LATENT, row_at(row)
    return Row(f"pages of {name}", noise(2, padded, kind=np.uint8), lambda m: quantized.describe(m, name, **told),
               index, nbytes, notation, **ONE, **facts)  # fmt: skip


def rows(name):
    """Two blocks of 64 rows, as dims: of a latent with a 1 before or after the tokens, too."""
    row, nbytes, _ = NBYTES[name]
    if name in HEADED:
        return Row(f"rows of {name}", noise(2, 64, 8, row, kind=np.uint8),
                   lambda m: quantized.describe([m], name, layer_start=5), lambda m, l, p, b, t, h: m[b, t, h], nbytes,
                   "layer: block token head dim", **ONE, parts="kv", heads=range(8))  # fmt: skip
    if name in REGIONS:
        return Row(f"rows of {name}", noise(2, nbytes, kind=np.uint8),
                   lambda m: quantized.describe(m.reshape(2, 64, row), name, layer_start=5, part="index"),
                   region_at(name, 64), nbytes,
                   "layer: block (token dim)", **ONE, parts="index index_scale", heads=range(1),
                   same=(lambda m: quantized.describe(m.reshape(2, 64, 1, row), name, layer_start=5, part="index"),
                         lambda m: quantized.describe(m.reshape(2, 1, 64, row), name, layer_start=5, part="index",
                                                      block_tokens=64)))  # fmt: skip
    return Row(f"rows of {name}", noise(2, 64, row, kind=np.uint8),
               lambda m: quantized.describe([m], name, layers=[5]), lambda m, l, p, b, t, h: m[b, t], nbytes,
               "layer: block token dim", **ONE, **LATENT,
               same=(lambda m: quantized.describe([m[:, None]], name, layers=[5]),
                     lambda m: quantized.describe([m[:, :, None]], name, layers=[5])))  # fmt: skip


# Bytes of 16 tokens x 8 heads at head_dim 128.
BLOCK_OF_16 = {
    "int8_per_token_head": 33_792,
    "fp8_per_token_head": 33_792,
    "int4_per_token_head": 17_408,
    "turboquant_k8v4": 25_088,
    "turboquant_4bit_nc": 17_152,
    "turboquant_k3v4_nc": 15_104,
    "turboquant_3bit_nc": 13_056,
}
# Five rows a page, with the padding of the format.
PADDED = {
    "deepseek_v4": (2_920, 3_456),
    "deepseek_v41": (2_640, 3_072),
    "deepseek_v41_nvfp4": (1_440, 1_536),
    "deepseek_v41_split": (2_640, 3_072),
    "deepseek_v41_nvfp4_split": (1_440, 1_536),
    "indexer_fp8": (660, 660),
    "fp8_ds_mla": (3_280, 3_280),
}
# Bytes of a row of head_dim 64: two bits less a value are 16 bytes less.
OF_64 = (136, 136, 72, 100, 70, 62, 54)

HND = [
    *(Row(f"{name}, 16 tokens, HND", noise(2, 8, 16, NBYTES[name][0], kind=np.uint8),
          lambda m, name=name: quantized.describe([m], name, kv_layout="HND"), lambda m, l, p, b, t, h: m[b, h, t],
          nbytes, "layer: block head token dim", blocks=2, tokens=16, layers=(0,), parts="kv", heads=range(8),
          same=(lambda m, name=name: quantized.describe([m.swapaxes(1, 2)], name),
                lambda m, name=name: quantized.describe(m.reshape(2, -1), name, kv_layout="HND", block_tokens=16,
                                                        num_kv_heads=8)))
      for name, nbytes in BLOCK_OF_16.items()),
    *(Row(f"{name} of head_dim 64", noise(2, 4, 2, row, kind=np.uint8),
          lambda m, name=name: quantized.describe(m, name, head_dim=64), lambda m, l, p, b, t, h: m[b, t, h], 8 * row,
          "layer: block token head dim", blocks=2, layers=(0,), parts="kv")
      for name, row in zip(HEADED, OF_64, strict=True)),
    *(Row(f"nvfp4 pages, {order}", noise(3, 1_152, kind=np.uint8),
          lambda m, order=order: quantized.describe(m, "nvfp4", kv_layout=order, block_tokens=4, num_kv_heads=2,
                                                    head_start=4), nvfp4_at(4, 2, order=order), 1_152,
          f"layer: block ({inside})", layers=(0,), parts="k k_scale v v_scale", heads=range(4, 6),
          same=(lambda m, order=order: quantized.describe(m.reshape(3, 4, 4, 72), "nvfp4", kv_layout=order,
                                                          head_start=4),))
      for order, inside in (("NHD", "token head dim"), ("HND", "head token dim"))),
    Row("nvfp4 of 16 tokens", noise(2, 18_432, kind=np.uint8),
        lambda m: quantized.describe(m, "nvfp4", block_tokens=16, num_kv_heads=8), nvfp4_at(16, 8), 18_432,
        "layer: block (token head dim)", blocks=2, tokens=16, layers=(0,), parts="k k_scale v v_scale", heads=range(8)),
]  # fmt: skip


def five(name):
    content, padded = PADDED[name]
    facts = {"parts": "kv kv_scale", "heads": range(1)} if name in REGIONS else LATENT
    return Row(f"five rows of {name}", noise(3, padded, kind=np.uint8),
               lambda m: quantized.describe(m, name, block_tokens=5),
               region_at(name, 5) if name in REGIONS else row_at(NBYTES[name][0]), content, "layer: block (token dim)",
               tokens=5, layers=(0,), **facts)  # fmt: skip


OTHERS = [
    Row("an indexer beside a latent", [noise(3, 64, 656, kind=np.uint8), noise(3, 8_448, kind=np.uint8)],
        lambda m: KVLayout.merge([quantized.describe(m[0], "fp8_ds_mla"),
                                  quantized.describe(m[1], "indexer_fp8", block_tokens=64, part="index")]),
        lambda m, l, p, b, t, h: region_at("indexer_fp8", 64)(m[1], l, p - 1, b, t, h) if p else m[0][b, t], 50_432,
        "layer: block token dim + layer: block (token dim)", layers=(0,), tokens=64, parts="kv index index_scale",
        heads=range(1)),
    Row("padded rows", noise(3, 70, 672, kind=np.uint8), lambda m: quantized.describe(m[:, :64, :656], "fp8_ds_mla"),
        lambda m, l, p, b, t, h: m[b, t, :656], 41_984, "layer: block token dim", layers=(0,), tokens=64, **LATENT),
    Row("a part of a name", noise(3, 4, 528, kind=np.uint8),
        lambda m: quantized.describe(m, "deepseek_v41", part="swa"), lambda m, l, p, b, t, h: m[b, t], 2_112,
        "layer: block token dim", layers=(0,), parts="swa", heads=range(1)),
]  # fmt: skip

GROUPS = {
    "quantized": [
        *map(pages, NBYTES),
        *(rows(name) for name in NBYTES if name != "nvfp4"),
        *map(five, PADDED),
        *HND,
        *OTHERS,
    ],
}
ROWS = named(GROUPS)
