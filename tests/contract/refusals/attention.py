"""Refusals of adapters: attention backends, latents, states, quantized rows, LMCache, FlexKV, TensorRT-LLM."""

from __future__ import annotations

from enum import Enum
from types import SimpleNamespace

import numpy as np
import torch

from kvplan import LayoutError
from kvplan.backends import (
    cross_layer,
    flash_attention,
    flashinfer,
    flexkv,
    lmcache,
    mla,
    quantized,
    state,
    transformers,
)
from kvplan.backends import tensorrt_llm as trt
from tests.contract.refusals.table import REFUSED

FIVE = np.zeros((2, 4, 16, 2, 8), np.int8)
FOUR = np.zeros((4, 16, 2, 8), np.int8)
REFUSED["flash_attention.describe", flash_attention.describe, LayoutError] = [
    ([FOUR], "kv_caches[0] ... (4, 16, 2, 8) ... 4 dims ... 2, num_blocks"),
    ([FIVE, FIVE[None]], "kv_caches[1] ... (1, 2, 4, 16, 2, 8) ... 6 dims"),
    (FIVE[0, :, :, None], "extent 4 ... not 2"),
    (np.zeros((8, 2, 4, 2, 8)), "extent 8 ... not 2 ... backends.flashinfer"),
    ([(FOUR, FOUR, FOUR)], "kv_caches[0] ... of 3 ... [4, 4, 4]"),
    ([(FIVE, FIVE)], "kv_caches[0] ... of 2 ... [5, 5]"),
    (([FOUR] * 3, [FOUR] * 3), "kv_caches[0] ... of 3 ... [4, 4, 4]"),
    ([FIVE, (FOUR, FOUR)], "kv_caches[0] ... kv_caches[1]"),
    ({"layer.0": FIVE}, "kv_caches is a dict ... give a list"),
    (["cache"], "kv_caches[0] is a str ... one tensor"),
]

PAGED = np.zeros((8, 2, 16, 4, 8), np.int8)
HALF = np.zeros((8, 16, 4, 8), np.int8)
REFUSED["flashinfer.describe", lambda caches, order: flashinfer.describe(caches, kv_layout=order), LayoutError] = [
    (PAGED, "HDN", "kv_layout ... 'HDN' ... 'NHD' ... 'HND'"),
    ([HALF], "NHD", "(8, 16, 4, 8) ... 4 dims ... NHD ... num_pages ... 2, page_tokens"),
    (PAGED[None], "HND", "6 dims ... HND ... num_pages ... 2, heads ... page_tokens ... head_dim"),
    (PAGED[:, :1], "NHD", "extent 1 ... not 2 ... NHD"),
    (np.zeros((2, 8, 16, 4, 8)), "NHD", "extent 8 ... not 2 ... backends.flash_attention"),
    ([(HALF,) * 3], "NHD", "kv_caches[0] ... of 3 ... [4, 4, 4]"),
    ([(HALF, HALF), PAGED], "NHD", "kv_caches[0] ... kv_caches[1]"),
    ({"0": PAGED}, "NHD", "kv_caches is a dict ... give a list"),
    (["cache"], "NHD", "kv_caches[0] is a str ... NHD"),
]

Type = Enum("Type", {name: name for name in ("LAYERFIRST", "BLOCKFIRST", "LAYERBLOCK", "OTHER")})


def told(name, *, mla=False, **other):
    """A KVCacheLayout of 3 layers, 5 blocks of 4 tokens, 2 heads (1 for MLA) of 8."""
    sizes = {"num_layer": 3, "num_block": 5, "tokens_per_block": 4, "num_head": 1 if mla else 2, "head_size": 8}
    return SimpleNamespace(**({"type": Type[name], "is_mla": mla} | sizes | other))


STORE, FLAT = np.zeros((5, 3, 2, 4, 2, 8), np.float16), np.zeros(5 * 3 * 2 * 4 * 2 * 8, np.float16)
LAYER = np.zeros((2, 5, 4, 2, 8), np.float16)
HANDLE = SimpleNamespace(data=STORE, kv_layout=told("BLOCKFIRST"))
REFUSED["flexkv.describe", lambda store, form, more: flexkv.describe(store, form, **more), LayoutError] = [
    (STORE, None, {}, "kv_layout ... NoneType ... KVCacheLayout ... BLOCKFIRST"),
    (STORE, "PAGEFIRST", {}, "kv_layout ... 'PAGEFIRST' ... KVCacheLayout ... 'BLOCKFIRST'"),
    (HANDLE, "BLOCKFIRST", {}, "StorageHandle ... kv_layout"),
    (["/ssd/0"], "BLOCKFIRST", {}, "storage ... FlexKV"),
    ([], "LAYERFIRST", {}, "storage ... list of no tensors"),
    ([STORE], "BLOCKFIRST", {}, "LAYERFIRST ... LAYERBLOCK ... BLOCKFIRST"),
    ([LAYER] * 6, told("LAYERFIRST"), {}, "6 tensors ... num_layer ... is 3 ... backends.sglang"),
    (FLAT, "BLOCKFIRST", {}, "(1920,) ... KVCacheLayout"),
    (FLAT[:-8], told("BLOCKFIRST"), {}, "extent 1912 ... block=5 ... layer=3"),
    (STORE[0], "BLOCKFIRST", {}, "(3, 2, 4, 2, 8) ... has 5 dims ... expected 6"),
    ([STORE], "LAYERFIRST", {}, "has 6 dims ... expected 5"),
    (STORE, "LAYERFIRST", {}, "is 3 ... is 2, or ... 1 ... MLA"),
    (STORE, told("BLOCKFIRST", mla=True), {}, "is 2 ... is 1"),
    (STORE, told("BLOCKFIRST", layer_groups=[1]), {}, "kv_layout ... layer_groups"),
    (STORE, told("BLOCKFIRST", packed_kv=True), {}, "kv_layout ... packed_kv"),
]

TWO = np.zeros((2, 3, 8, 16), np.float16)
REFUSED["lmcache.describe", lambda objects, more: lmcache.describe(objects, **more), LayoutError] = [
    ([TWO], {}, "(2, 3, 8, 16) ... KV_2LTD ... 'kv layer token head dim' ... heads="),
    ([TWO], {"heads": 3}, "extent 16 ... head=3"),
    ([TWO], {"object_format": "KV_MLA_FMT"}, "(2, 3, 8, 16) ... KV_MLA_FMT"),
    ([[TWO]], {"heads": 2}, "object_format ... 'KV_2LTD' ... nested 2 deep ... KV_T2D ... KV_2TD"),
    ([TWO], {"object_format": "KV_T2D"}, "object_format ... 'KV_T2D' ... KV_2LTD ... KV_MLA_"),
    ([], {}, "no memory objects"),
    ([TWO], {"group": 1, "heads": 2}, "group= ... memory objects ... tensors"),
    (["object"], {}, "memory object ... str"),
    ([TWO], {"engine_format": "NL_X_NB_QQ_HS_ZZ"}, "'QQ' ... 'ZZ' ... NB ... NL"),
    ([TWO], {"engine_format": ""}, "'' ... unknown letters"),
    ([TWO], {"engine_format": "NL_X_NB_BS_HS", "heads": 2}, "object_format ... heads and ... group are"),
]
REFUSED["lmcache.describe", lambda more: lmcache.describe([np.zeros((2, 256, 132), np.uint8)], **more), LayoutError] = [
    ({"opaque_tokens": 48}, "opaque_tokens ... is 48 ... holds 256 tokens"),
    ({"opaque_tokens": 64, "heads": 2}, "opaque_tokens ... one plane ... 'block: layer token (head kv dim)'"),
    ({"opaque_tokens": 64, "engine_format": "NL_X_NB_BS_HS"}, "group ... memory objects ... opaque"),
]

THREE = np.zeros((8, 64, 576), np.float16)
REFUSED["mla.describe", lambda caches, more: mla.describe(caches, **more), LayoutError] = [
    (THREE[:, :, None].repeat(2, 2), {}, "(8, 64, 2, 576) ... MLA"),
    (np.zeros((8, 1, 1, 576)), {}, "(8, 1, 1, 576) ... one head"),
    (THREE[None, None], {}, "(1, 1, 8, 64, 576) ... MLA ... num_blocks"),
    (THREE[0], {}, "(64, 576) ... block_tokens= ... whole_blocks="),
    (THREE, {"block_tokens": 64}, "(8, 64, 576) ... block_tokens= ... 1"),
    (THREE[0], {"block_tokens": 48}, "extent 64 ... block= ... token=48"),
    (THREE[0], {"block_tokens": 0}, "'token' ... is 0 ... least 1"),
    (THREE, {"row_nbytes": 1153}, "row_nbytes ... is 1153 ... have 1152 bytes ... of 2"),
    (THREE, {"row_nbytes": 1151}, "row_nbytes ... is 1151 ... have 1152 bytes ... of 2"),
    ([(THREE, THREE)], {}, "kv_caches[0] is a tuple ... one tensor"),
    ({0: THREE}, {"part": "index"}, "kv_caches is a dict ... one tensor a layer"),
    (THREE, {"kpe": THREE, "part": "c"}, "kpe= ... 'ckv' ... 'kpe'"),
    (THREE, {"kpe": THREE, "row_nbytes": 2}, "takes no part, row_nbytes ... seams"),
]

POOL = np.zeros((3, 2, 2, 4, 2, 8), np.int8)
REFUSED["cross_layer.describe", cross_layer.describe] = [
    ([POOL[0]], "layer: block kv token head dim", LayoutError, "nests tensors ... one tensor"),
    (POOL, "block: layer kv token head dim", LayoutError, "':' ... without"),
    (POOL[0], "block kv token head dim", LayoutError, "'block kv token head dim' ... layer dim"),
    ([POOL], "block layer kv token head dim", LayoutError, "tensor is a list ... one tensor"),
    (POOL, "kv layer block token head dim", LayoutError, "extent 3 ... kv=2"),
]

RECORDS, PAGES, PTH = (
    np.zeros((2, 64, 584), np.uint8),
    np.zeros((2, 8_448), np.uint8),
    np.zeros((2, 4, 8, 264), np.uint8),
)
REFUSED["quantized.describe", lambda caches, form, more: quantized.describe(caches, form, **more), LayoutError] = [
    (RECORDS, "fp9", {}, "row_format ... 'fp9' ... fp8_ds_mla ... nvfp4_ds_mla ... deepseek_v41"),
    (PTH, "int8_per_token_head", {"kv_layout": "DHN"}, "kv_layout ... 'DHN' ... 'NHD' ... 'HND'"),
    (RECORDS.view(np.int16), "deepseek_v4", {}, "caches[0] ... (2, 64, 292) ... of 2"),
    ([RECORDS, RECORDS.astype(np.int32)], "deepseek_v4", {}, "caches[1] ... of 4 bytes"),
    ([], "deepseek_v4", {}, "shape () ... rows of this format"),
    ({0: RECORDS}, "deepseek_v4", {}, "caches is a dict ... give a list"),
    ([(RECORDS, RECORDS)], "deepseek_v4", {}, "caches[0] is a tuple ... one tensor"),
    (RECORDS, "fp8_ds_mla", {}, "of 584 bytes ... 'fp8_ds_mla' ... has 656 ... nope 512 ... scale 16 ... rope 128"),
    (PTH, "int8_per_token_head", {"head_dim": 64}, "of 264 ... has 136 ... k 64 ... k_scale ... v 64"),
    (RECORDS[:, None].repeat(2, 1), "deepseek_v4", {}, "(2, 2, 64, 584) ... 'block token dim' ... pages"),
    (RECORDS, "nvfp4", {}, "(2, 64, 584) ... 'block token head dim'"),
    (PAGES, "indexer_fp8", {}, "block_tokens= ... pages ... bytes"),
    (PAGES, "nvfp4", {"block_tokens": 4}, "block_tokens= ... num_kv_heads="),
    (RECORDS, "deepseek_v4", {"block_tokens": 32}, "block_tokens ... is 32 ... (2, 64, 584) ... says 64"),
    (PTH, "int8_per_token_head", {"num_kv_heads": 4}, "num_kv_heads ... is 4 ... (2, 4, 8, 264) ... says 8"),
    (PAGES, "indexer_fp8", {"block_tokens": 32}, "of 8448 bytes ... 32 rows ... are 4224 ... data 128"),
    (np.zeros((2, 37_888), np.uint8), "deepseek_v4", {"block_tokens": 64}, "are 37376 ... or 37440"),
    (np.zeros((2, 4, 584), np.uint8)[:, ::2], "deepseek_v4", {}, "a page is not contiguous"),
    (np.zeros((2, 64, 600), np.uint8)[..., :584], "deepseek_v4", {}, "a page is not contiguous ... though"),
]


ONE = np.zeros((4, 3, 8), np.float16)
REFUSED["state.describe", lambda states, more: state.describe(states, **more), LayoutError] = [
    ([], {}, "states is empty ... give a list"),
    ({"conv": ONE}, {}, "states is a dict ... give a list"),
    ([None], {}, "states[0] ... NoneType"),
    ([()], {}, "states[0] ... tuple that ... neither"),
    ([(ONE, ONE), (ONE,)], {}, "states[1] ... holds 1 tensors ... 'conv' ... 'ssm'"),
    ([(ONE, ONE, ONE)], {}, "3 tensors ... parts= ... 'conv' ... 'ssm'"),
    ([(ONE, ONE)], {"parts": ["conv"]}, "'conv' ... holds 2 tensors"),
    ([(ONE, ONE.copy())], {"parts": ["a", "a"]}, "'a' ... holds 2"),
    ([ONE], {"parts": "conv"}, "parts ... 'conv'"),
    (ONE.swapaxes(1, 2), {}, "'state' ... states[0] ... (4, 8, 3)"),
    ([torch.zeros(4, 3, 8).transpose(1, 2)], {}, "(96, 4, 32) ... bytes ... slot"),
    ([np.zeros(())], {}, "'state' of states[0] ... shape () ... (slots,"),
]

SIZES = {"tokens_per_block": 4, "num_kv_heads": 2}
TRT, SLOTS = np.zeros((4, 3, 2, 64), np.float16), np.zeros((4, 384), np.float16)
V2 = SimpleNamespace(get_buffers=None, layer_offsets={0: 0}, impl=SimpleNamespace(get_mem_pool_base_address=None))
MANAGER = SimpleNamespace(
    layer_offsets={0: 0},
    get_buffers=lambda layer_idx, kv_layout="NHD": TRT[:, 0],
    impl=SimpleNamespace(get_primary_pool_data=lambda offset: TRT[:, offset]),
)
REFUSED["tensorrt_llm.describe", lambda pool, more: trt.describe(pool, **more), LayoutError] = [
    (TRT, {"kv_layout": "DHN"}, "kv_layout ... 'DHN' ... 'NHD' ... 'HND'"),
    (TRT, {}, "(4, 3, 2, 64) ... into 64 elements ... tokens_per_block= ... num_kv_"),
    (TRT, {"num_kv_heads": 2}, "tokens_per_block= ... num_kv_heads="),
    (TRT, {"tokens_per_block": 5, "num_kv_heads": 2}, "extent 64 ... head=2 ... token=5"),
    (TRT.reshape(4, 2, 3, 64), SIZES, "(4, 2, 3, 64) ... dim 2 ... kv_factor ... 1 or ... 2, not"),
    ([TRT], SIZES, "(4, 3, 2, 64) ... has 4 dims"),
    ([TRT[:, :, 0]], SIZES, "(4, 3, 64) ... dim 1 ... kv_factor ... 1 or ... 2, not"),
    (TRT.reshape(4, 3, 2, 8, 8), SIZES, "(4, 3, 2, 8, 8) ... has 5 dims"),
    (None, {}, "pool is a NoneType ... a pool is"),
    ([], {}, "pool is a list of no tensors"),
    (SLOTS, {"tokens_per_block": 4}, "(4, 384) ... tokens_per_block="),
    (TRT, {"whole_blocks": True, **SIZES}, "whole_blocks= ... True has ... tokens"),
    (MANAGER, {"layers": [1]}, "layers= ... manager numbers"),
    (MANAGER, {"layer_start": 1}, "manager numbers ... layers"),
    (V2, {}, "SimpleNamespace ... version 2 keeps"),
]


def paged_cache(nbytes=5 * 512, **changed):
    """What describe reads of transformers' PagedAttentionCache."""
    allocator = {
        "layer_indices": [0, 1],
        "tokens_per_page": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "cache_dtype": np.dtype(np.float16),
        "bytes_per_page": 256,
        "bytes_per_block": 512,
    }
    full = SimpleNamespace(**allocator | changed)
    return SimpleNamespace(cache_tensor=np.zeros(nbytes, np.uint8), cache_allocators={"full_attention": full})


REFUSED["transformers.describe", transformers.describe, LayoutError] = [
    (object(), "'cache_tensor' ... PagedAttentionCache"),
    (SimpleNamespace(cache_tensor=0), "SimpleNamespace ... 'cache_allocators'"),
    (paged_cache(bytes_per_page=144, bytes_per_block=288), "of 144 bytes ... of 288"),
    (paged_cache(bytes_per_block=1024), "are 256, and ... of 2 layers ... 512"),
    (paged_cache(nbytes=5 * 512 + 128), "cache_tensor ... has 2688 bytes ... the 512 ... 'full_attention'"),
]
