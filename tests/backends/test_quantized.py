"""quantized: rows with scales inside, pages in regions, and scales in tensors of their own."""

import numpy as np
import pytest
import torch

from kvplan import LayoutError
from kvplan.backends import quantized
from tests.backends.rows import hold_every_row

# name: bytes a row, and a page of 64 rows (of 8 heads where there are heads, at head_dim 128)
NBYTES = {
    "fp8_ds_mla": (656, 41_984),
    "nvfp4_ds_mla": (352, 22_528),
    "deepseek_v41": (528, 33_792),
    "deepseek_v41_nvfp4": (288, 18_432),
    "int8_per_token_head_mla": (584, 37_376),
    "int4_per_token_head_mla": (296, 18_944),
    "deepseek_v4": (584, 37_376),
    "deepseek_v41_split": (528, 33_792),
    "deepseek_v41_nvfp4_split": (288, 18_432),
    "indexer_fp8": (132, 8_448),
    "indexer_fp8_tiled": (132, 8_448),
    "indexer_mxfp4": (68, 4_352),
    "int8_per_token_head": (264, 135_168),
    "fp8_per_token_head": (264, 135_168),
    "int4_per_token_head": (136, 69_632),
    "turboquant_k8v4": (196, 100_352),
    "turboquant_4bit_nc": (134, 68_608),
    "turboquant_k3v4_nc": (118, 60_416),
    "turboquant_3bit_nc": (102, 52_224),
    "nvfp4": (144, 73_728),
}
HEADED = [name for name in NBYTES if quantized.FORMATS[name].headed]

# bytes of 16 tokens x 8 heads at head_dim 128
BLOCK_OF_16 = {
    "int8_per_token_head": 33_792, "fp8_per_token_head": 33_792, "int4_per_token_head": 17_408,
    "turboquant_k8v4": 25_088, "turboquant_4bit_nc": 17_152, "turboquant_k3v4_nc": 15_104,
    "turboquant_3bit_nc": 13_056, "nvfp4": 18_432,
}  # fmt: skip


def test_every_format_has_a_source():
    assert set(NBYTES) == set(quantized.FORMATS)
    for form in quantized.FORMATS.values():
        assert form.source.startswith(("vLLM 0.33.0, ", "SGLang 0.5.23, "))


@pytest.mark.parametrize("name", NBYTES)
def test_bytes_of_rows_and_pages(name):
    row, page = NBYTES[name]
    assert quantized.FORMATS[name].nbytes(128) == row
    heads = {"num_kv_heads": 8} if name in HEADED else {}
    pages = quantized.describe(torch.zeros(3, page, dtype=torch.uint8), name, block_tokens=64, **heads)
    assert (pages.block_nbytes, pages.num_blocks, pages.block_tokens) == (page, 3, 64)
    shape = (3, 64, 8, row) if name in HEADED else (3, 64, row)
    if name == "nvfp4":
        shape = 3, 64, 16, 72
    rows = quantized.describe([torch.zeros(shape, dtype=torch.uint8)] * 1, name, layer_start=5)
    assert (rows.block_nbytes, rows.layers, rows.heads) == (page, (5,), range(8 if name in HEADED else 1))


@pytest.mark.parametrize("name", BLOCK_OF_16)
def test_bytes_of_a_block_of_16(name):
    pages = torch.zeros(2, BLOCK_OF_16[name], dtype=torch.uint8)
    layout = quantized.describe(pages, name, block_tokens=16, num_kv_heads=8)
    assert (layout.block_nbytes, layout.heads, layout.block_tokens) == (BLOCK_OF_16[name], range(8), 16)


def test_another_head_dim():
    """D = 64: two bits less a value is 16 bytes less a row; 3 bits of 20 values and a norm are rounded to even."""
    sizes = {name: quantized.FORMATS[name].nbytes(64) for name in HEADED}
    assert list(sizes.values()) == [136, 136, 72, 100, 70, 62, 54, 72]
    assert quantized.FORMATS["turboquant_k3v4_nc"].nbytes(20) == 24  # 8 + 2, 10 + 4
    assert quantized.FORMATS["turboquant_k3v4_nc"].nbytes(18) == 22  # 7 + 2, 9 + 4
    assert quantized.FORMATS["turboquant_k8v4"].nbytes(17) == 30  # 17, 9 + 4
    assert quantized.FORMATS["turboquant_k8v4"].nbytes(15) == 28  # 15, 8 + 4, and one byte more
    assert (
        quantized.describe(np.zeros((2, 16, 4, 54), np.uint8), "turboquant_3bit_nc", head_dim=64).block_nbytes == 3_456
    )


@pytest.mark.parametrize("shape", [(5, 4, 656), (5, 1, 4, 656), (5, 4, 1, 656)])
def test_rows_of_a_latent(shape):
    caches = [torch.zeros(shape, dtype=torch.uint8) for _ in range(2)]
    layout = quantized.describe(caches, "fp8_ds_mla", layers=[3, 8])
    plain = [cache.reshape(5, 4, 656) for cache in caches]
    assert (layout.layers, layout.parts) == ((3, 8), ("kv",))
    assert hold_every_row(layout, lambda layer, kv, block, token, head: plain[layer][block, token]) == 40


def test_padded_rows_of_a_latent():
    storage = torch.zeros(3, 70, 672, dtype=torch.uint8)
    layout = quantized.describe(storage[:, :64, :656], "fp8_ds_mla")
    assert layout.block_nbytes == 41_984
    hold_every_row(layout, lambda layer, kv, block, token, head: storage[block, token])


def test_pages_of_rows():
    pages = np.zeros((3, 4 * 352), np.uint8)
    layout = quantized.describe(pages, "nvfp4_ds_mla", block_tokens=4)
    hold_every_row(layout, lambda layer, kv, block, token, head: pages[block, token * 352 :])
    assert layout == quantized.describe(pages.reshape(3, 4, 352), "nvfp4_ds_mla")
    heads = np.zeros((3, 2 * 4 * 134), np.uint8)
    nhd = quantized.describe(heads, "turboquant_4bit_nc", block_tokens=4, num_kv_heads=2, head_start=6)
    assert (nhd.heads, nhd.parts) == (range(6, 8), ("kv",))
    hold_every_row(nhd, lambda layer, kv, block, token, head: heads[block, (token * 2 + head) * 134 :])
    hnd = quantized.describe(heads, "turboquant_4bit_nc", block_tokens=4, num_kv_heads=2, kv_layout="HND")
    hold_every_row(hnd, lambda layer, kv, block, token, head: heads[block, (head * 4 + token) * 134 :])


@pytest.mark.parametrize("name", [name for name in HEADED if name != "nvfp4"])
def test_rows_with_heads(name):
    row = NBYTES[name][0]
    cache = torch.zeros(3, 2, 4, row, dtype=torch.uint8)  # vLLM's logical (B, H, N, C)
    layout = quantized.describe([cache], name, kv_layout="HND")
    assert layout.notation == "layer: block head token dim"
    assert hold_every_row(layout, lambda layer, kv, block, token, head: cache[block, head, token]) == 24
    permuted = torch.zeros(3, 4, 2, row, dtype=torch.uint8).transpose(1, 2)  # the same shape in NHD order
    layout = quantized.describe([permuted], name, kv_layout="HND")
    hold_every_row(layout, lambda layer, kv, block, token, head: permuted[block, head, token])
    assert layout == quantized.describe([permuted.transpose(1, 2)], name)


REGION_BYTES = {
    "deepseek_v4": (576, 8), "deepseek_v41_split": (512, 16), "deepseek_v41_nvfp4_split": (256, 32),
    "indexer_fp8": (128, 4), "indexer_mxfp4": (64, 4),
}  # fmt: skip


@pytest.mark.parametrize("name", REGION_BYTES)
def test_regions_of_a_page(name):
    data, scale = REGION_BYTES[name]
    pages = torch.zeros(3, 4 * (data + scale), dtype=torch.uint8)
    align = quantized.FORMATS[name].align
    padded = torch.zeros(3, -(-4 * (data + scale) // align) * align, dtype=torch.uint8)
    for cache in (pages, padded):
        layout = quantized.describe([cache], name, block_tokens=4, part="index")
        assert layout.parts == ("index", "index_scale")

        def row(layer, part, block, token, head, cache=cache):
            return cache[block, (token * data, 4 * data + token * scale)[part] :]

        assert hold_every_row(layout, row) == 3 * 2 * 4
        assert layout.slice(parts=["index"]).block_nbytes == 4 * data
    assert quantized.describe(pages.view(3, 4, 1, -1), name, part="index") == quantized.describe(
        pages.view(3, 4, -1), name, part="index", block_tokens=4
    )


PADDED = {
    "deepseek_v4": 3_456, "deepseek_v41": 3_072, "deepseek_v41_nvfp4": 1_536, "deepseek_v41_split": 3_072,
    "deepseek_v41_nvfp4_split": 1_536, "indexer_fp8": 660, "fp8_ds_mla": 3_280,
}  # fmt: skip


@pytest.mark.parametrize("name", PADDED)
def test_pages_of_five_rows(name):
    layout = quantized.describe(np.zeros((2, PADDED[name]), np.uint8), name, block_tokens=5)
    assert layout.block_nbytes == 5 * NBYTES[name][0]
    assert layout.component(0, "kv").form.block_offset(1) == PADDED[name]
    with pytest.raises(LayoutError, match=f"pages of {PADDED[name] + 1} bytes"):
        quantized.describe(np.zeros((2, PADDED[name] + 1), np.uint8), name, block_tokens=5)


def test_deepseek_v4_pages_are_padded_to_576():
    pages = torch.zeros(3, 37_440, dtype=torch.uint8)
    layout = quantized.describe(pages, "deepseek_v4", block_tokens=64)
    assert layout.block_nbytes == 37_376
    steps = [layout.address(layer=0, part=part, block=2, token=63) - pages.data_ptr() for part in layout.parts]
    assert steps == [2 * 37_440 + 63 * 576, 2 * 37_440 + 36_864 + 63 * 8]
    # As the engine's view of the same memory, squeezed or not, (B, N, C) over padded blocks.
    view = pages[:, :37_376].view(3, 64, 584)
    assert quantized.describe(view, "deepseek_v4") == layout
    assert quantized.describe(pages.as_strided((3, 64, 1, 584), (37_440, 584, 7, 1)), "deepseek_v4") == layout


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_nvfp4_pages(kv_layout):
    """vLLM: K data, K scales, V data, V scales of 2 heads x 4 tokens, 64 + 8 bytes a row."""
    pages = torch.zeros(3, 4 * 2 * 144, dtype=torch.uint8)
    layout = quantized.describe(pages, "nvfp4", kv_layout=kv_layout, block_tokens=4, num_kv_heads=2, head_start=4)
    assert (layout.parts, layout.heads) == (("k", "k_scale", "v", "v_scale"), range(4, 6))

    def row(layer, part, block, token, head):
        place = token * 2 + head if kv_layout == "NHD" else head * 4 + token
        return pages[block, (0, 512, 576, 1088)[part] + place * (64, 8, 64, 8)[part] :]

    assert hold_every_row(layout, row) == 3 * 4 * 4 * 2
    view = pages.view(3, 4, 4, 72)  # (B, 2 H, N, C), or (B, N, 2 H, C): both extents are 4 here
    assert quantized.describe(view, "nvfp4", kv_layout=kv_layout, head_start=4) == layout


def test_seams_and_parts():
    cache = np.zeros((4, 8_448), np.uint8)
    seam = cache[2].ctypes.data
    layout = quantized.describe(cache, "indexer_fp8", block_tokens=64, part="index", seams=[seam])
    assert (layout.parts, layout.seams) == (("index", "index_scale"), (seam,))
    assert quantized.describe(ROWS[..., :528], "deepseek_v41", part="swa").parts == ("swa",)
    assert quantized.describe(PAGES, "indexer_fp8", block_tokens=64).layers == (0,)
    assert quantized.describe(PTH, "int8_per_token_head", layer_start=2).layers == (2,)
    assert quantized.describe(PTH, "int8_per_token_head").heads == range(8)


ROWS, PAGES, PTH = np.zeros((2, 64, 584), np.uint8), np.zeros((2, 8_448), np.uint8), np.zeros((2, 4, 8, 264), np.uint8)
CASES = {
    "unknown": (ROWS, "fp9", {}, "row_format is 'fp9'; the known ones are fp8_ds_mla, nvfp4_ds_mla, deepseek_v41, "),
    "order": (PTH, "int8_per_token_head", {"kv_layout": "DHN"}, "kv_layout is 'DHN'; it is one of 'NHD', 'HND'"),
    "elements": (ROWS.view(np.int16), "deepseek_v4", {}, r"caches\[0\] has shape \(2, 64, 292\) and elements of 2 "),
    "one of bf16": ([ROWS, ROWS.astype(np.int32)], "deepseek_v4", {}, r"caches\[1\] has .* elements of 4 bytes"),
    "uneven": ([ROWS, ROWS[:1]], "deepseek_v4", {}, r"caches\[1\] has shape \(1, 64, 584\).* caches\[0\] has shape"),
    "none": ([], "deepseek_v4", {}, "give caches as a list with one tensor a layer"),
    "a dict": ({0: ROWS}, "deepseek_v4", {}, "give caches as a list with one tensor a layer"),
    "pairs": ([(ROWS, ROWS)], "deepseek_v4", {}, "give caches as a list with one tensor a layer"),
    "row": (ROWS, "fp8_ds_mla", {}, r"rows of 584 bytes; 'fp8_ds_mla' has 656 \(nope 512 \+ scale 16 \+ rope 128\)"),
    "another D": (PTH, "int8_per_token_head", {"head_dim": 64}, r"rows of 264 .* has 136 \(k 64 \+ k_scale 4 \+ v 64"),
    "nvfp4 row": (PTH, "nvfp4", {}, r"rows of 264 bytes; 'nvfp4' has 2 of 72 \(k 64 \+ k_scale 8 \+ v 64 \+ v_scale 8"),
    "heads": (ROWS[:, None].repeat(2, 1), "deepseek_v4", {}, r"shape \(2, 2, 64, 584\); rows .*blocks, tokens, row\)"),
    "no heads": (ROWS, "nvfp4", {}, r"shape \(2, 64, 584\); rows .* \(blocks, tokens, heads, row\), or pages"),
    "no heads, HND": (ROWS, "nvfp4", {"kv_layout": "HND"}, r"are \(blocks, heads, tokens, row\), or pages \(blocks, b"),
    "rank 1": (ROWS[0, 0], "deepseek_v4", {}, r"shape \(584,\); rows of this format"),
    "pages": (PAGES, "indexer_fp8", {}, "pages of bytes: give block_tokens=$"),
    "pages, heads": (PAGES, "nvfp4", {"block_tokens": 4}, "pages of bytes: give block_tokens= and num_kv_heads=$"),
    "tokens": (ROWS, "deepseek_v4", {"block_tokens": 32}, r"block_tokens is 32; shape \(2, 64, 584\) says 64"),
    "kv heads": (PTH, "int8_per_token_head", {"num_kv_heads": 4}, r"num_kv_heads is 4; shape \(2, 4, 8, 264\) says 8"),
    "small pages": (PAGES, "indexer_fp8", {"block_tokens": 32}, "pages of 8448 bytes; 32 rows .* are 4224 .data 128 "),
    "other pad": (np.zeros((2, 37_888), np.uint8), "deepseek_v4", {"block_tokens": 64}, "are 37376 .* or 37440 with "),
    "no rows": (PAGES, "indexer_fp8", {"block_tokens": 0}, "pages of 8448 bytes; 0 rows"),
    "tiles": (np.zeros((2, 8, 132), np.uint8), "indexer_fp8_tiled", {}, "8 rows a page; .* comes in tiles of 16 rows"),
    "two apart": (np.zeros((2, 4, 584), np.uint8)[:, ::2], "deepseek_v4", {}, "a page is not contiguous"),
    "apart": (np.zeros((2, 64, 600), np.uint8)[..., :584], "deepseek_v4", {}, "a page is not contiguous, though its"),
    "layers": ([ROWS], "deepseek_v4", {"layers": [1, 2]}, r"layers are \(1, 2\); the tensors hold 1"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_refusals(case):
    given, name, options, message = CASES[case]
    with pytest.raises(LayoutError, match=message):
        quantized.describe(given, name, **options)
