"""quantized: bytes of every format arrive in pools of other orders and block sizes."""

import numpy as np
import pytest

import kvplan
from kvplan import IncompatibleLayoutsError, KVLayout
from kvplan.backends import quantized
from tests.backends.moves import move, noise


@pytest.mark.parametrize(("name", "data", "scale", "nbytes"), [
    ("deepseek_v4", 576, 8, 37_440), ("indexer_fp8", 128, 4, 8_448), ("deepseek_v41_nvfp4_split", 256, 32, 18_432),
])  # fmt: skip
def test_regions_go_to_blocks_of_another_size(name, data, scale, nbytes):
    """Pages of 64 rows to a page-first host of 32: data and scales each to their own, the pad to nobody."""
    pages = [noise((4, nbytes), seed) for seed in range(2)]
    layout = quantized.describe(pages, name, block_tokens=64)
    parts = [
        kvplan.allocate("(block token) layer dim", like=layout.slice(parts=[part]), num_blocks=7, block_tokens=32)
        for part in layout.parts
    ]
    program = move(layout, KVLayout.merge(parts), [3, 0], [6, 1, 2, 5])
    assert (program.unit_tokens, program.runs, program.run_nbytes) == (32, 128, (scale, data))
    for (block, half), slot in {(3, 0): 6, (3, 1): 1, (0, 0): 2, (0, 1): 5}.items():
        for layer in range(2):
            rows = pages[layer][block, half * 32 * data :][: 32 * data].reshape(32, data)
            assert (parts[0].tensors[slot * 32 : slot * 32 + 32, layer] == rows).all()
            rows = pages[layer][block, 64 * data + half * 32 * scale :][: 32 * scale].reshape(32, scale)
            assert (parts[1].tensors[slot * 32 : slot * 32 + 32, layer] == rows).all()
    back = [np.full((4, nbytes), 7, np.uint8) for _ in range(2)]
    move(KVLayout.merge(parts), quantized.describe(back, name, block_tokens=64), [2, 5], [1])
    content = 64 * (data + scale)
    for layer in range(2):
        assert (back[layer][1, :content] == pages[layer][0, :content]).all()
        assert (back[layer][1, content:] == 7).all()
        assert (back[layer][[0, 2, 3]] == 7).all()


def test_tiled_pages_of_rocm_become_plain_ones():
    """Tiles of 16 rows x 16 bytes: the keys of vLLM and SGLang on ROCm, copied to pages as CUDA has them."""
    rows, scales = noise((3, 32, 128)), noise((3, 32, 4), 1)
    tiled = rows.reshape(3, 2, 16, 8, 16).transpose(0, 1, 3, 2, 4).reshape(3, -1)
    pages = np.concatenate([tiled, scales.reshape(3, -1)], 1)
    plain = np.zeros((5, 64 * 132), np.uint8)
    src = quantized.describe(pages, "indexer_fp8_tiled", block_tokens=32)
    assert src.address(layer=0, part="kv", token=17) == pages.ctypes.data + 16 * 128 + 16
    program = move(src, quantized.describe(plain, "indexer_fp8", block_tokens=64), [2, 0], [4])
    assert (program.unit_tokens, program.run_nbytes) == (32, (16, 128))
    assert (plain[4, :8192].reshape(64, 128) == np.concatenate([rows[2], rows[0]])).all()
    assert (plain[4, 8192:].reshape(64, 4) == np.concatenate([scales[2], scales[0]])).all()
    assert not plain[:4].any()


# parts of a row in bytes (of one head), and the word that rows a multiple of their own size apart leave to a kernel
ROWS = {
    "fp8_ds_mla": ((656,), 16), "nvfp4_ds_mla": ((352,), 32), "deepseek_v41": ((528,), 16),
    "deepseek_v41_nvfp4": ((288,), 32), "int8_per_token_head_mla": ((584,), 8), "int4_per_token_head_mla": ((296,), 8),
    "deepseek_v4": ((576, 8), 8), "indexer_fp8": ((128, 4), 4), "indexer_mxfp4": ((64, 4), 4),
    "int8_per_token_head": ((264,), 8), "int4_per_token_head": ((136,), 8), "turboquant_k8v4": ((196,), 4),
    "turboquant_4bit_nc": ((134,), 2), "turboquant_k3v4_nc": ((118,), 2), "turboquant_3bit_nc": ((102,), 2),
}  # fmt: skip


def aligned(shape):
    """Zeros that begin at a multiple of 64."""
    size = int(np.prod(shape))
    flat = np.zeros(size + 63, np.uint8)
    return flat[-flat.ctypes.data % 64 :][:size].reshape(shape)


@pytest.mark.parametrize("name", ROWS)
def test_rows_to_a_page_first_host(name):
    """Rows of two layers inside a token: one run a row and layer, in words as small as the row asks for."""
    (row, alignment), form = ROWS[name], quantized.FORMATS[name]
    heads, told = (3, {"num_kv_heads": 3}) if form.headed else (1, {})
    page = -(-16 * heads * sum(row) // form.align) * form.align
    caches = [aligned((4, page)) for _ in range(2)]
    for layer, cache in enumerate(caches):
        cache[:] = noise(cache.shape, layer)
    src = quantized.describe(caches, name, block_tokens=16, **told)
    rows = {part: heads * nbytes for part, nbytes in zip(src.parts, row, strict=True)}
    pools = {part: aligned((96, 2, nbytes)) for part, nbytes in rows.items()}
    order = "(block token) layer (head dim)" if form.headed else "(block token) layer dim"
    sizes = {"token": 32, "head": 3} if form.headed else {"token": 32}
    dst = [KVLayout.from_tensors(order, pool, sizes=sizes, part=part) for part, pool in pools.items()]
    program = move(src, KVLayout.merge(dst), [3, 1], [2])
    assert (program.alignment, program.unit_tokens) == (alignment, 16)
    assert program.run_nbytes == (min(rows.values()), max(rows.values()))
    start = 0
    for part, nbytes in rows.items():
        for layer, cache in enumerate(caches):
            expected = cache[[3, 1], start : start + 16 * nbytes].reshape(32, nbytes)
            assert (pools[part][64:, layer] == expected).all()
        assert not pools[part][:64].any()
        start += 16 * nbytes


def test_interleaved_and_split_records_do_not_mix():
    """528 bytes in either order: the parts tell them apart."""
    cache = np.zeros((2, 64, 528), np.uint8)
    with pytest.raises(IncompatibleLayoutsError):
        kvplan.compile(quantized.describe(cache, "deepseek_v41"), quantized.describe(cache, "deepseek_v41_split"))
    with pytest.raises(IncompatibleLayoutsError):
        kvplan.compile(
            quantized.describe(np.zeros((2, 64, 584), np.uint8), "int8_per_token_head_mla"),
            quantized.describe(cache, "deepseek_v41"),
        )


def test_whole_blocks_refuse_other_sizes():
    """Opaque pages, as mla's whole_blocks: what describe's regions are there to avoid."""
    pages = KVLayout.from_tensors("block dim", np.zeros((2, 8_448), np.uint8))
    with pytest.raises(IncompatibleLayoutsError):
        kvplan.compile(pages, KVLayout.from_tensors("block dim", np.zeros((4, 4_224), np.uint8)))
    with pytest.raises(IncompatibleLayoutsError):
        kvplan.compile(pages, quantized.describe(np.zeros((2, 8_448), np.uint8), "indexer_fp8", block_tokens=64))
