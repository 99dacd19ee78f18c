"""sglang: device pools in each of their layouts, their scales and index keys; what is refused."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

import kvplan
from kvplan import LayoutError
from kvplan.backends import sglang
from tests.backends.rows import hold_every_row
from tests.backends.sglang.sglang_pools import dsa_pool, host_mha, host_mla, mha_pool, mla_pool, unified_pool


def test_flat_slots():
    pool = mha_pool(start=5)
    layout = sglang.describe(pool, head_start=4)
    assert layout.notation == "kv layer: (block token) head dim"
    assert (layout.layers, layout.parts, layout.heads) == ((5, 6, 7), ("k", "v"), range(4, 8))
    assert (layout.num_blocks, layout.block_tokens, layout.block_nbytes) == (4, 4, 1536)  # 3 * 2 * 4 * 4 * 16
    k = pool.k_buffer[1].data_ptr()
    assert layout.address(layer=6, part="k", block=2, token=3, head=5) == k + 2 * 256 + 3 * 64 + 16
    assert layout.address(layer=6, part="v") == k + 16 * 64  # V is the second half of the layer's allocation
    rows = (pool.k_buffer, pool.v_buffer)
    assert hold_every_row(layout, lambda layer, kv, block, token, head: rows[kv][layer][4 * block + token, head]) == 384
    assert layout == sglang.describe((pool.k_buffer, pool.v_buffer), page_size=4, layer_start=5, head_start=4)
    assert layout == sglang.describe(
        [pool.k_buffer, pool.v_buffer], page_size=4, layout="nhd", layer_start=5, head_start=4
    )


def test_slots_after_the_last_whole_page_are_left_out():
    layout = sglang.describe(mha_pool(size=14))  # 18 slots
    assert (layout.num_blocks, layout.block_tokens) == (4, 4)
    assert sglang.describe([np.zeros((18, 1, 8))] * 1, page_size=4).num_blocks == 4


def test_memory_that_came_after_capture_ends_with_the_pool():
    pool = mha_pool(size=28)
    pool.post_capture_active, pool.size = True, 9
    assert sglang.describe(pool).num_blocks == 3  # 13 slots have memory behind them
    pool = mha_pool(size=28, form="hnd")
    pool.post_capture_active, pool.size = True, 9
    assert sglang.describe(pool).num_blocks == 3
    pool.post_capture_active = False
    assert sglang.describe(pool).num_blocks == 8
    latent = mla_pool(size=28)
    latent.post_capture_active, latent.size = True, 9
    assert sglang.describe(latent).num_blocks == 3


def test_global_numbers():
    pool = mha_pool(start=2)
    pool.model_layer_ids = (3, 7, 11)  # of the full layers of a hybrid
    assert sglang.describe(pool).layers == (3, 7, 11)
    assert sglang.describe(pool, layer_start=40).layers == (40, 41, 42)
    assert sglang.describe(pool, layer_start=0).layers == (0, 1, 2)
    assert sglang.describe(pool, layers=[1, 2, 4]).layers == (1, 2, 4)
    del pool.model_layer_ids
    assert sglang.describe(pool).layers == (2, 3, 4)


def test_strided_rows_of_the_unified_pool():
    pool = unified_pool()
    layout = sglang.describe(pool)
    assert (layout.num_blocks, layout.block_nbytes) == (4, 1536)
    assert (
        layout.address(layer=2, part="v", block=3, token=1, head=2) == pool.raw.data_ptr() + 64 + 13 * 1600 + 320 + 32
    )
    rows = (pool.k_buffer, pool.v_buffer)
    hold_every_row(layout, lambda layer, kv, block, token, head: rows[kv][layer][4 * block + token, head])
    program = kvplan.compile(layout, sglang.describe(host_mha("page_first")))
    assert (program.runs, program.run_nbytes) == (24, (64, 64))


def test_hnd():
    pool = mha_pool(form="hnd")
    layout = sglang.describe(pool)
    assert layout.notation == "kv layer: block head token dim"
    assert (layout.num_blocks, layout.block_tokens, layout.heads, layout.block_nbytes) == (4, 4, range(4), 1536)
    rows = (pool.k_buffer, pool.v_buffer)
    hold_every_row(layout, lambda layer, kv, block, token, head: rows[kv][layer][block, head, token])
    assert layout == sglang.describe((pool.k_buffer, pool.v_buffer), page_size=4, layout="hnd")


def test_vectorized_5d(executor):
    """ROCm: 16 bytes of K lie together, and in V 16 bytes of tokens of one element."""
    pool = mha_pool(form="vectorized_5d", page=16, size=32, dim=16)
    for k, v in zip(pool.k_buffer, pool.v_buffer, strict=True):
        k.copy_(torch.randn(k.shape))
        v.copy_(torch.randn(v.shape))
    layout = sglang.describe(pool)
    assert layout.notation == "layer: block head dim.0 token dim.1 + layer: block head token.0 dim token.1"
    assert (layout.parts, layout.num_blocks, layout.block_tokens, layout.block_nbytes) == (("k", "v"), 3, 16, 12_288)
    rows = (pool.k_buffer, pool.v_buffer)
    hold_every_row(layout, lambda layer, kv, block, token, head: (
        rows[1][layer][block, head, token // 8, 0, token % 8] if kv else rows[0][layer][block, head, 0, token]
    ))  # fmt: skip
    plain = mha_pool(page=16, size=32, dim=16)
    executor.submit(kvplan.compile(layout, sglang.describe(plain)).plan(range(3), range(3))).synchronize()
    for layer in range(3):
        k = pool.k_buffer[layer].permute(0, 3, 1, 2, 4).reshape(48, 4, 16)  # page, token, head, dim / 8, 8
        v = pool.v_buffer[layer].permute(0, 2, 4, 1, 3).reshape(48, 4, 16)  # page, token / 8, 8, head, dim
        assert torch.equal(plain.k_buffer[layer], k)
        assert torch.equal(plain.v_buffer[layer], v)


def test_values_of_another_width():
    pool = mha_pool(v_dim=4)
    layout = sglang.describe(pool, head_start=2)
    assert (layout.parts, layout.heads, layout.block_nbytes) == (("k", "v"), range(2, 6), 3 * 4 * 4 * (16 + 8))
    rows = (pool.k_buffer, pool.v_buffer)
    hold_every_row(layout, lambda layer, kv, block, token, head: rows[kv][layer][4 * block + token, head])


@pytest.mark.parametrize(
    ("heads", "dim", "page", "dtype", "nbytes"),
    [
        (8, 128, 16, torch.bfloat16, 65_536), (2, 128, 16, torch.bfloat16, 16_384),
        (8, 128, 16, torch.float8_e4m3fn, 32_768), (8, 64, 16, torch.bfloat16, 32_768),
    ],
)  # fmt: skip
def test_bytes_a_block_and_layer(heads, dim, page, dtype, nbytes):
    pool = mha_pool(size=16, heads=heads, dim=dim, page=page, layers=1, dtype=dtype)
    assert sglang.describe(pool).block_nbytes == nbytes


@pytest.mark.parametrize(
    ("dim", "dtype", "nbytes"),
    [
        (576, torch.bfloat16, 73_728),
        (576, torch.uint8, 36_864),
        (656, torch.uint8, 41_984),
        (352, torch.uint8, 22_528),
    ],
)
def test_bytes_of_a_latent_block(dim, dtype, nbytes):
    pool = mla_pool(size=64, page=64, dim=dim, layers=1, dtype=dtype)
    assert sglang.describe(pool).block_nbytes == nbytes
    host = host_mla("page_first", page=64, dim=dim, layers=1, dtype=dtype)
    assert sglang.describe(host).block_nbytes == nbytes


def test_latents():
    pool = mla_pool(start=9)
    layout = sglang.describe(pool)
    assert layout.notation == "layer: (block token) 1 dim"
    assert (layout.layers, layout.parts, layout.num_blocks, layout.block_tokens) == ((9, 10, 11), ("kv",), 4, 4)
    assert layout.block_nbytes == 3 * 4 * 48
    hold_every_row(layout, lambda layer, kv, block, token, head: pool.kv_buffer[layer][4 * block + token, 0])
    assert layout == sglang.describe(pool.kv_buffer, page_size=4, layer_start=9)


def test_layers_of_other_ranks_hold_no_rows():
    pool = mla_pool(layers=4, owned=(1, 2), start=8)
    layout = sglang.describe(pool)
    assert layout.layers == (9, 10)
    assert layout.address(layer=10, part="kv") == pool.kv_buffer[2].data_ptr()
    assert sglang.describe(pool, layers=[3, 5, 7, 9]).layers == (5, 7)
    assert sglang.describe(pool, layer_start=0).layers == (1, 2)
    with pytest.raises(LayoutError, match=r"layers are \(5, 7\); the pool has 4, those without rows counted"):
        sglang.describe(pool, layers=[5, 7])


def test_index_keys_are_a_part():
    pool = dsa_pool(skip=(1,), start=4)
    layout = sglang.describe(pool)
    assert (layout.parts, layout.num_blocks, layout.block_tokens) == (("kv", "index"), 4, 64)
    assert layout.slice(parts=["index"]).layers == (4, 6)
    assert layout.block_nbytes == 3 * 41_984 + 2 * 8448
    assert layout.address(layer=6, part="index", block=3) == pool.index_k_with_scale_buffer[2][3].data_ptr()
    pool.index_k_with_scale_buffer = [torch.zeros(0, 8448, dtype=torch.uint8)] * 3
    assert sglang.describe(pool).parts == ("kv",)
    pool.index_k_with_scale_buffer = [torch.zeros(5, 8448, dtype=torch.uint8) for _ in range(3)]
    assert sglang.describe(pool).num_blocks == 4  # a page more may be there


@pytest.mark.parametrize("pages", [3, 6])
def test_index_keys_under_other_ids(pages):
    pool = dsa_pool()
    pool.index_k_with_scale_buffer = [torch.zeros(pages, 8448, dtype=torch.uint8) for _ in range(3)]
    with pytest.raises(LayoutError, match=rf"SimpleNamespace has {pages} pages of index keys and 4 of latents"):
        sglang.describe(pool)


def test_fp4_scales_of_k_and_v():
    """A byte of scales for 16 values; in the older pool a row for all heads, else a dim of their own."""
    pool = mha_pool(dim=16, dtype=torch.uint8)  # 32 values of 4 bits
    pool.k_scale_buffer, pool.v_scale_buffer = (
        [torch.zeros(16, 4 * 2, dtype=torch.uint8) for _ in "abc"] for _ in "kv"
    )
    layout = sglang.describe(pool)
    assert layout.parts == ("k", "v", "k_scale", "v_scale")
    assert layout.block_nbytes == 3 * 4 * 4 * 2 * (16 + 2)
    at = pool.v_scale_buffer[1][4 * 2 + 3].data_ptr()
    assert layout.address(layer=1, part="v_scale", block=2, token=3, head=3) == at + 6
    for name in ("k_scale_buffer", "v_scale_buffer"):
        setattr(pool, name, [scales.view(16, 4, 2) for scales in getattr(pool, name)])
    assert sglang.describe(pool) == layout


def test_native_fp4_scales_move_as_whole_pages():
    pool = mha_pool(dim=16, dtype=torch.uint8)
    pool.native_k_scale_buffer = [torch.zeros(4, 4, 4, 2, dtype=torch.uint8) for _ in range(3)]
    pool.native_v_scale_buffer = [torch.zeros(4, 4, 4, 2, dtype=torch.uint8) for _ in range(3)]
    layout = sglang.describe(pool)
    assert layout.parts == ("k", "v", "k_native_scale", "v_native_scale")
    at = pool.native_v_scale_buffer[2][3, 1].data_ptr()
    assert layout.address(layer=2, part="v_native_scale", block=3, head=1) == at
    assert layout.slice(parts=["k_native_scale"]).opaque


def test_mxfp8_scales_are_interleaved_in_pages_of_128():
    pool = mha_pool(page=128, size=256, dim=128, heads=2, layers=2, dtype=torch.uint8)
    pool.k_scale_buffer, pool.v_scale_buffer = (
        [torch.zeros(3, 2, 32, 4, 4, dtype=torch.uint8) for _ in "ab"] for _ in "kv"
    )
    layout = sglang.describe(pool)
    assert (layout.num_blocks, layout.block_tokens, layout.block_nbytes) == (3, 128, 2 * 128 * 2 * 2 * 132)
    part = layout.slice(parts=["k_scale", "v_scale"])
    rows = (pool.k_scale_buffer, pool.v_scale_buffer)
    hold_every_row(part, lambda layer, kv, block, token, head: rows[kv][layer][block, head, token % 32, token // 32])


def test_fp4_scales_of_latents():
    pool = mla_pool(dim=16, dtype=torch.uint8)
    pool.kv_scale_buffer = [torch.zeros(16, 2, dtype=torch.uint8) for _ in range(3)]
    layout = sglang.describe(pool)
    assert (layout.parts, layout.block_nbytes) == (("kv", "kv_scale"), 3 * 4 * 18)
    part = layout.slice(parts=["kv_scale"])
    hold_every_row(part, lambda layer, kv, block, token, head: pool.kv_scale_buffer[layer][4 * block + token])


def test_keys_of_an_index_branch():
    pool = mha_pool()
    pool.v_buffer = None
    layout = sglang.describe(pool)
    assert (layout.parts, layout.block_nbytes) == (("index",), 768)
    hold_every_row(layout, lambda layer, kv, block, token, head: pool.k_buffer[layer][4 * block + token, head])


K = [np.zeros((16, 4, 8), np.float16) for _ in range(2)]
HOST = np.zeros((2, 3, 16, 4, 8), np.float16)
Pool = SimpleNamespace
CASES = {
    "pool of pools": (Pool(full_kv_pool=1, swa_kv_pool=2), {}, "pool of pools, .* full_kv_pool, swa_kv_pool hold, one"),
    "group": (Pool(entries=[1], layout="page_first"), {}, "pool of pools, .* describe what entries holds, one by one"),
    "layout of a pool": (mha_pool(), {"layout": "nhd"}, "a pool .SimpleNamespace. has its own layout, page"),
    "page of a pool": (mha_pool(), {"page_size": 4}, "has its own layout, page_size"),
    "seams of a pool": (mha_pool(), {"seams": [1]}, "has its own layout, page_size and seams"),
    "no pool": (Pool(page_size=4), {}, "has no 'kv_buffer'; give a device or host pool of SGLang"),
    "no page": (Pool(k_buffer=K, v_buffer=K), {}, "SimpleNamespace has no 'page_size'"),
    "tails": (Pool(kpool_use_compress=True), {}, "keeps compress tails a request"),
    "ascend": (Pool(k_buffer=HOST, page_size=4), {}, "a pool of Ascend, .* with backends.cross_layer"),
    "ascend latents": (Pool(kv_buffer=HOST, page_size=4), {}, "a pool of Ascend"),
    "ascend host": (Pool(layout="page_first_kv_split", kv_buffer=HOST), {}, "a pool of Ascend"),
    "envelopes": (Pool(layout="page_first", stores_page_envelope=True, head_num=1), {}, "keeps packed page rows"),
    "packed rows": (Pool(layout="page_first", kv_buffer=HOST), {}, "keeps packed page rows .* as whole blocks"),
    "dummy": (Pool(layout="page_first", page_size=4, kv_lora_rank=512, kv_buffer=None), {}, "it only allocates"),
    "host layout": (Pool(layout="page_last", page_size=4, head_num=4, kv_buffer=HOST), {},
                    "layout, of K and V, is 'page_last'; it is one of 'layer_first', 'page_first'"),
    "heads of a latent": (Pool(layout="page_head", page_size=4, kv_lora_rank=4, kv_buffer=HOST), {},
                          "layout, of MLA, is 'page_head'; it is one of 'layer_first', 'page_first', 'page"),
    "unified halves": (Pool(layout="page_unified", page_size=4, head_num=4, kv_buffer=(HOST, HOST)), {},
                       "layout, of K or V alone, is 'page_unified'; it is one of 'layer_first', 'page_first'"),
    "device layout": (Pool(**{**vars(mha_pool()), "kv_cache_layout": "page_major_layer_major"}), {},
                      "kv_cache_layout is 'page_major_layer_major'; it is one of 'nhd', 'page_major', 'hnd'"),
    "tensor page": ((K, K), {}, "tensors do not show their page_size"),
    "tensor layout": ((K, K), {"page_size": 4, "layout": "first"}, "layout is 'first'; it is one of 'nhd', 'page_m"),
    "one tensor": (HOST, {"page_size": 4}, "one tensor: give layout="),
    "lists as host": ((K, K), {"page_size": 4, "layout": "page_first"}, "layout 'page_first' with a tuple of 0 dims"),
    "rank": (HOST[0, 0], {"page_size": 4, "layout": "page_first"},
             r"a ndarray of 3 dims; it is one tensor, of K and V 'kv \(block token\) layer head dim' or of MLA"),
    "rank of page_head": (HOST[0], {"page_size": 4, "layout": "page_head"}, "V 'kv block head token layer dim'$"),
    "three lists": ((K, K, K), {"page_size": 4}, "3 lists of tensors; give two, all of K and all of V"),
    "no lists": ([], {"page_size": 4}, "0 lists of tensors"),
    "pages of others": (HOST, {"page_size": 5, "layout": "layer_first"}, "dim of extent 16 .* cannot be .*token=5"),
    "more heads than one": (K, {"page_size": 4}, "dim of extent 4 in 'layer: .block token. 1 dim' cannot be 1"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_refusals(case):
    given, options, message = CASES[case]
    with pytest.raises(LayoutError, match=message):
        sglang.describe(given, **options)
