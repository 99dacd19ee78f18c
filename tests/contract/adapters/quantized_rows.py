"""Rows of quantized: every row format as rows and as pages, and scales in tensors of their own."""

import numpy as np

from kvplan import KVLayout
from kvplan.backends import quantized
from tests.contract.adapters.rows import Row, named, noise

# Bytes a row; of a page of 64 rows (of 8 heads where there are heads, at head_dim 128); and of it with its padding.
LATENTS = {
    "fp8_ds_mla": (656, 41_984, 41_984),
    "nvfp4_ds_mla": (352, 22_528, 22_528),
    "deepseek_v41": (528, 33_792, 33_792),
    "deepseek_v41_nvfp4": (288, 18_432, 18_432),
    "int8_per_token_head_mla": (584, 37_376, 37_376),
    "int4_per_token_head_mla": (296, 18_944, 18_944),
}
REGIONS = {
    "deepseek_v4": (584, 37_376, 37_440),
    "deepseek_v41_split": (528, 33_792, 33_792),
    "deepseek_v41_nvfp4_split": (288, 18_432, 18_432),
    "indexer_fp8": (132, 8_448, 8_448),
    "indexer_mxfp4": (68, 4_352, 4_352),
}
HEADED = {
    "int8_per_token_head": (264, 135_168, 135_168),
    "fp8_per_token_head": (264, 135_168, 135_168),
    "int4_per_token_head": (136, 69_632, 69_632),
    "turboquant_k8v4": (196, 100_352, 100_352),
    "turboquant_4bit_nc": (134, 68_608, 68_608),
    "turboquant_k3v4_nc": (118, 60_416, 60_416),
    "turboquant_3bit_nc": (102, 52_224, 52_224),
}
NBYTES = LATENTS | REGIONS | HEADED | {"nvfp4": (144, 73_728, 73_728)}
# Bytes of a row of head_dim 64: two bits less a value are 16 bytes less.
OF_64 = (136, 136, 72, 100, 70, 62, 54)
# Bytes of scales in a row, where they are not 4: all data of a page, then all scales.
SCALE = {"deepseek_v4": 8, "deepseek_v41_split": 16, "deepseek_v41_nvfp4_split": 32}
# Bytes of five rows a page, with the padding of the format.
PADDED = {"deepseek_v4": 3_456, "deepseek_v41": 3_072, "deepseek_v41_nvfp4": 1_536, "deepseek_v41_split": 3_072,
          "deepseek_v41_nvfp4_split": 1_536, "indexer_fp8": 660, "fp8_ds_mla": 3_280}  # fmt: skip
LATENT = {"parts": "kv", "heads": range(1)}
ONE = {"blocks": 2, "tokens": 64, "layers": (5,)}


def placed(tokens, heads, order, *rows):
    """Where rows of so many bytes are in a page, one kind of them after the other."""
    starts = [sum(rows[:k]) * tokens * heads for k in range(len(rows))]
    token, head = (heads, 1) if order == "NHD" else (1, tokens)
    return " | ".join(f"b {start}+{token * row}t+{head * row}h:{row}" for start, row in zip(starts, rows, strict=True))


def region(name, tokens):
    """Where data and scales are."""
    scale = SCALE.get(name, 4)
    return placed(tokens, 1, "NHD", NBYTES[name][0] - scale, scale)


def pages(name):
    """Two pages of 64 rows."""
    row, nbytes, padded = NBYTES[name]
    options, facts, notation = {"block_tokens": 64, "layer_start": 5}, LATENT, "layer: block (token dim)"
    index = placed(64, 1, "NHD", row)
    if name in REGIONS:
        facts, index = {"parts": "kv kv_scale", "heads": range(1)}, region(name, 64)
    elif name == "nvfp4" or name in HEADED:
        options |= {"num_kv_heads": 8, "head_start": 8}
        facts = {"parts": "k k_scale v v_scale" if name == "nvfp4" else "kv", "heads": range(8, 16)}
        index = placed(64, 8, "NHD", *((64, 8, 64, 8) if name == "nvfp4" else (row,)))
        notation = "layer: block (token head dim)"
    return Row(f"pages of {name}", noise(2, padded, kind=np.uint8), lambda m: quantized.describe(m, name, **options),
               index, notation, nbytes=nbytes, **ONE, **facts)  # fmt: skip


def rows(name):
    """Two blocks of 64 rows, as dims: of a latent with a 1 before or after the tokens, too."""
    row, nbytes, _ = NBYTES[name]
    if name in HEADED:
        return Row(f"rows of {name}", noise(2, 64, 8, row, kind=np.uint8),
                   lambda m: quantized.describe([m], name, layer_start=5), "b t h", "layer: block token head dim",
                   nbytes=nbytes, parts="kv", heads=range(8), **ONE)  # fmt: skip

    def described(m, *shape, **more):
        part = {"part": "index"} if name in REGIONS else {}
        return quantized.describe(m.reshape(2, *shape, row), name, layer_start=5, **part, **more)

    known = {"block_tokens": 64} if name in REGIONS else {}
    if name in REGIONS:
        memory, index, notation = noise(2, nbytes, kind=np.uint8), region(name, 64), "layer: block (token dim)"
        facts = {"parts": "index index_scale", "heads": range(1)}
    else:
        memory, index, notation, facts = noise(2, 64, row, kind=np.uint8), "b t", "layer: block token dim", LATENT
    return Row(f"rows of {name}", memory, lambda m: described(m, 64), index,
               notation, nbytes=nbytes, **ONE, **facts,
               same=(lambda m: described(m, 64, 1), lambda m: described(m, 1, 64, **known)))  # fmt: skip


def sixteen(name):
    def described(m, **more):
        return quantized.describe(m, name, **more)

    page = {"block_tokens": 16, "num_kv_heads": 8}
    return Row(f"{name}, 16 tokens, HND", noise(2, 8, 16, NBYTES[name][0], kind=np.uint8),
               lambda m: described([m], kv_layout="HND"), "b h t", "layer: block head token dim", blocks=2, tokens=16,
               parts="kv", heads=range(8),
               same=(lambda m: described([m.swapaxes(1, 2)]),
                     lambda m: described(m.reshape(2, -1), kv_layout="HND", **page)))  # fmt: skip


def of_64(name, row):
    return Row(f"{name} of head_dim 64", noise(2, 4, 2, row, kind=np.uint8),
               lambda m: quantized.describe(m, name, head_dim=64), "b t h", "layer: block token head dim", blocks=2,
               parts="kv")  # fmt: skip


def nvfp4(order, inside):
    page = {"kv_layout": order, "head_start": 4}
    return Row(f"nvfp4 pages, {order}", noise(3, 1_152, kind=np.uint8),
               lambda m: quantized.describe(m, "nvfp4", block_tokens=4, num_kv_heads=2, **page),
               placed(4, 2, order, 64, 8, 64, 8), f"layer: block ({inside})", parts="k k_scale v v_scale",
               heads=range(4, 6),
               same=(lambda m: quantized.describe(m.reshape(3, 4, 4, 72), "nvfp4", **page),))  # fmt: skip


def five(name):
    facts = {"parts": "kv kv_scale", "heads": range(1)} if name in REGIONS else LATENT
    return Row(f"five rows of {name}", noise(3, PADDED[name], kind=np.uint8),
               lambda m: quantized.describe(m, name, block_tokens=5),
               region(name, 5) if name in REGIONS else placed(5, 1, "NHD", NBYTES[name][0]),
               "layer: block (token dim)", tokens=5, **facts)  # fmt: skip


PAGES = [
    *map(pages, NBYTES),
    *map(rows, LATENTS | REGIONS | HEADED),
    *map(five, PADDED),
    *map(sixteen, HEADED),
    *map(of_64, HEADED, OF_64),
    nvfp4("NHD", "token head dim"),
    nvfp4("HND", "head token dim"),
    Row("nvfp4 of 16 tokens", noise(2, 18_432, kind=np.uint8),
        lambda m: quantized.describe(m, "nvfp4", block_tokens=16, num_kv_heads=8), placed(16, 8, "NHD", 64, 8, 64, 8),
        "layer: block (token head dim)", blocks=2, tokens=16, parts="k k_scale v v_scale", heads=range(8)),
]  # fmt: skip

OTHERS = [
    Row("an indexer beside a latent", [noise(3, 64, 656, kind=np.uint8), noise(3, 8_448, kind=np.uint8)],
        lambda m: KVLayout.merge([quantized.describe(m[0], "fp8_ds_mla"),
                quantized.describe(m[1], "indexer_fp8", block_tokens=64, part="index")]),
        "0 b t | 1 b 128t:128 | 1 b 8192+4t:4", "layer: block token dim + layer: block (token dim)", tokens=64,
        parts="kv index index_scale"),
    Row("padded rows", noise(3, 70, 672, kind=np.uint8), lambda m: quantized.describe(m[:, :64, :656], "fp8_ds_mla"),
        "b t :656", "layer: block token dim", tokens=64),
    Row("a part of a name", noise(3, 4, 528, kind=np.uint8),
        lambda m: quantized.describe(m, "deepseek_v41", part="swa"), "b t", "layer: block token dim", parts="swa"),
]  # fmt: skip

ROWS = named({"quantized": [*PAGES, *OTHERS]})
