"""Refusals of the adapters of vLLM's caches and SGLang's pools."""

from __future__ import annotations

import sys
from types import SimpleNamespace as Pool
from unittest import mock

import numpy as np
import torch

from kvplan import LayoutError
from kvplan.backends import sglang, vllm
from tests.backends.sglang.sglang_pools import dsa_pool, mha_pool, mla_pool
from tests.contract.refusals.table import rows

ROWS = []


def described(caches, more):
    """As where no vLLM is loaded, whose version and instruction set would count."""
    with mock.patch.dict(sys.modules):
        for name in ("vllm", "vllm.v1.attention.backends.cpu_attn"):
            sys.modules.pop(name, None)
        return vllm.describe(caches, **more)


CACHE = torch.zeros(3, 2, 32, 64, dtype=torch.bfloat16)
CPU = rows(
    "vllm.describe",
    lambda cache, more: described([cache], {"form": "cpu"} | more),
    LayoutError,
    [
        (CACHE, {"isa": "avx"}, "isa ... 'avx' ... 16, amx"),
        (CACHE, {"isa": 5}, "isa ... '5'"),
        (CACHE, {"isa": "x" * 9999}, "isa is 'xxxx"),
        (CACHE, {"form": "fused", "isa": "vec"}, "isa ... form='fused' ... 'cpu'"),
        (CACHE, {"isa": "neon_bfmmla"}, "isa='neon_bfmmla' ... version= ... vLLM"),
        (CACHE, {"isa": "neon_bfmmla", "version": "new"}, "version ... 'new' ... text"),
        (CACHE, {"version": 0.31}, "version ... '0.31' ... text"),
        (CACHE[:, :, :8], {"isa": "amx"}, "of 16 tokens ... and 2 dims ... of 8 token"),
        (CACHE[..., :16].clone(), {"isa": "amx"}, "of 2 tokens ... and 16 dims ... of 8 dims"),
        (CACHE.float(), {"isa": "amx"}, "of 4 bytes ... isa='amx' ... has 1 or ... 2"),
        (CACHE[..., :63].clone(), {"isa": "vec"}, "63 elements ... one size"),
        (CACHE.transpose(1, 2), {"isa": "vec"}, "(4096, 2) ... (128, 2)"),
    ],
)

FOUR = np.zeros((3, 2, 4, 16), np.int8)
FIVE = np.zeros((3, 2, 4, 2, 8), np.int8)
SLOTS = {"form": "head_slots", "heads": 2}
LATENT = "model.layers.3.self_attn.attn"
FORMS = rows(
    "vllm.describe",
    described,
    LayoutError,
    [
        (FOUR, {"form": "NHD"}, "form ... 'NHD' ... 'fused' ... 'latent' ... 'packed' ... 'whole_blocks'"),
        ([FIVE], {}, "(3, 2, 4, 2, 8) ... form='fused' ... of 5 dims"),
        (FIVE[0, 0], {}, "(4, 2, 8) ... of 3 dims ... paged_planes"),
        ({"layers.0": FIVE}, {}, "kv_caches['layers.0'] ... shape"),
        (FIVE, {"form": "planes"}, "dim 0 ... 3 ... form='planes' ... (2, B, N, H, D)"),
        (FIVE.swapaxes(0, 1), {"form": "pages"}, "dim 1 ... 3 ... form='pages'"),
        (np.zeros((3, 8, 4, 16)), SLOTS, "dim 1 ... 8 ... form='head_slots'"),
        (FOUR, {"form": "head_slots"}, "form='head_slots' ... heads= ... 'paged' ... 'shuffled'"),
        (FOUR, {"heads": 2}, "form='fused' ... heads="),
        (FOUR, SLOTS | {"heads": 3}, "extent 16 ... head=3"),
        (FOUR, SLOTS | {"heads": 0}, "heads ... is 0 ... least 1"),
        (FOUR, {"form": "cpu", "head_size_v": 8}, "head_size_v ... form='cpu' ... 'fused'"),
        (FOUR, {"head_size_v": 16}, "head_size_v ... is 16 ... of 16 elements"),
        (FOUR, {"head_size_v": -1}, "head_size_v ... is -1 ... least 0"),
        (FOUR, {"form": "rows", "head_size_v": 0}, "head_size_v ... is 0"),
        (FOUR, {"form": "latent"}, "extent 2 ... 'layer: block 1 token dim' ... be 1"),
        (FOUR[..., :15], {}, "extent 15 ... kv=2"),
        (FOUR[:, :, ::2], SLOTS | {"form": "paged"}, "x-packed caches ... dense"),
        (FOUR, SLOTS | {"form": "shuffled"}, "of 4 token ... of 16"),
        (FOUR, {"block_tokens": 6}, "block_tokens ... is 6 ... have 4 token"),
        (FOUR, {"block_tokens": 8}, "extent 3 ... block= ... token.0= ... 2"),
        (FOUR, {"form": "whole_blocks", "block_tokens": 6}, "is 6 ... of 4"),
        (FOUR[0], {"form": "paged_planes", "heads": 1}, "form='paged_planes' ... block_tokens="),
        ("cache", {}, "kv_caches is a str ... dict of layer name"),
        (["cache"], {}, "kv_caches[0] is a str ... form='fused'"),
        ([], {}, "kv_caches holds no layer"),
        ({}, {}, "kv_caches holds no layer"),
        ([FOUR], {"names": ["a"]}, "kv_caches is a list ... names"),
        ({"layers.0": FOUR}, {"names": ["layers.1"]}, "'layers.1' ... kv_caches"),
        ({"attn": FOUR}, {}, "'attn' ... has 0 numbers"),
        ({"layers.0": FOUR}, {"layer_start": 3}, "layer_start ... is 3, and ... kv_caches"),
        ([FOUR], {"layers": [1, 2]}, "[1, 2] ... kv_caches ... holds 1"),
        ({"layers.0.attn": FOUR, "layers.1.attn": np.zeros((3, 1, 8, 16), np.int8)}, {}, "block_tokens differ"),
        (
            {LATENT: np.zeros((3, 1, 64, 656)), "layers.3.indexer.k_cache": np.zeros((3, 1, 64, 132))},
            {"form": "latent"},
            f"{LATENT} ... k_cache ... both layer 3",
        ),
        ({"layers.0.self_attn.1.attn": FOUR}, {}, "has 2 numbers ... layers="),
    ],
)

RAW = np.zeros(768, np.int8)
SIZES = {"layers": 2, "blocks": 3, "heads": 2, "tokens": 4, "row_nbytes": 16}
PLACES = rows(
    "vllm.place",
    lambda raw, more: vllm.place(raw, **(SIZES | more)),
    LayoutError,
    [
        (RAW, {"order": "LNBHC"}, "order ... 'LNBHC' ... vLLM ... LBHNC ... LBNHC ... LHBNC"),
        (RAW.reshape(2, 384), {}, "raw ... (2, 384) ... and 1 bytes"),
        (RAW.view(np.int16), {}, "raw ... (384,) ... and 2 bytes"),
        (RAW[::2], {}, "stride of 2"),
        ("raw", {}, "raw is str"),
        (RAW, {"heads": 0}, "heads ... is 0 ... least 1"),
        (RAW, {"block_stride": 1.5}, "block_stride ... is 1.5"),
        (RAW, {"page_nbytes": 100}, "page_nbytes ... is 100 ... holds 2 x ... 4 x ... 16 ... 128"),
        (RAW, {"page_nbytes": 128, "order": "LHBNC"}, "page_nbytes ... LHBNC"),
        (RAW, {"page_nbytes": 128, "order": "BHLNC"}, "page_nbytes ... BHLNC"),
        (RAW, {"blocks": 4}, "2 layers ... of 4 blocks ... LBHNC ... byte 0 ... byte 1024 ... has 768"),
        (RAW, {"offset": 1}, "byte 1 ... byte 769"),
        (RAW, {"offset": -1}, "byte -1"),
        (RAW, {"kernel_tokens": 3}, "kernel_tokens ... is 3 ... the 4"),
        (RAW, {"kernel_tokens": 2, "order": "BLHNC"}, "BLHNC ... are 256 bytes"),
        (np.zeros(960, np.int8), {"kernel_tokens": 2, "page_nbytes": 160}, "are 160 bytes ... apart"),
        (RAW, {"kernel_tokens": 2, "order": "LHBNC"}, "are 64 bytes ... hold 128"),
    ],
)


def nvfp4(order):
    sizes = {"layers": 2, "blocks": 3, "heads": 4, "tokens": 4, "row_nbytes": 18}
    return vllm.describe(vllm.place(np.zeros(2 * 3 * 320, np.uint8), **sizes, order=order), form="whole_blocks")


PLANES = torch.zeros(2, 3, 16, 2, 32, dtype=torch.float16)
HEAD_SLOTS = torch.zeros(3, 2, 16, 64, dtype=torch.float16)
ROCM = rows(
    "vllm.describe",
    lambda cache, more: described([cache], more),
    LayoutError,
    [
        (PLANES, {"form": "rocm", "version": "old"}, "version ... 'old' ... text ... 0.26"),
        (PLANES, {"form": "planes", "version": "0.26.0"}, "version ... form='planes' ... 'rocm' ... ROCM_A"),
        (PLANES, {"form": "rocm", "version": "0.26.0", "heads": 2}, "form='rocm' ... heads="),
        (PLANES.transpose(2, 3), {"form": "rocm", "version": "0.26.0"}, "last 3 dims ... packed caches"),
        (PLANES[:, :, :4].clone(), {"form": "shuffled_planes"}, "form='shuffled_planes' ... of 4 token"),
        (HEAD_SLOTS, {"form": "rocm", "version": "0.28.1"}, "form='rocm' ... (2, B, N, H, D)"),
        (PLANES, {"form": "rocm", "version": "0.33.0", "heads": 2}, "5 dims ... form='paged' ... (B, 2, N, H * D)"),
        (PLANES, {"form": "rocm"}, "form='rocm' ... version= ... 0.28 ... 0.29"),
    ],
)

K = [np.zeros((16, 4, 8), np.float16) for _ in range(2)]
HOST = np.zeros((2, 3, 16, 4, 8), np.float16)
BYTES = torch.zeros(4, 2, 64, dtype=torch.uint8)
STATES = [torch.zeros(3, 5, 3, 8, dtype=torch.float16)], torch.zeros(3, 5, 2, 4, 4)
MAMBA = Pool(mamba_cache=Pool(conv=STATES[0], temporal=STATES[1]), mamba_layer_ids=[1, 3, 5], _slot_siblings=[1, 2])
MAMBA_HOST = Pool(
    layout="page_first", page_size=1, conv_buffer=[torch.zeros(7, 3, 1, 3, 8, dtype=torch.float16)],
    temporal_buffer=torch.zeros(7, 3, 1, 2, 4, 4), slot_state_buffers=[BYTES],
)  # fmt: skip
INDEXED = dsa_pool()
INDEXED.index_k_with_scale_buffer = [torch.zeros(3, 8448, dtype=torch.uint8) for _ in range(3)]
SGLANG = rows(
    "sglang.describe",
    lambda pool, more: sglang.describe(pool, **more),
    LayoutError,
    [
        (Pool(full_kv_pool=1, swa_kv_pool=2), {}, "full_kv_pool ... swa_kv_pool"),
        (Pool(entries=[1], layout="page_first"), {}, "describe what ... entries holds"),
        (mha_pool(), {"layout": "nhd"}, "SimpleNamespace ... layout ... pool"),
        (mha_pool(), {"page_size": 4}, "page_size ... layout"),
        (mha_pool(), {"seams": [1]}, "page_size ... layout ... seams"),
        (Pool(page_size=4), {}, "'kv_buffer' ... SGLang"),
        (Pool(k_buffer=K, v_buffer=K), {}, "SimpleNamespace ... 'page_size'"),
        (Pool(kpool_use_compress=True), {}, "keeps compress tails"),
        (Pool(k_buffer=HOST, page_size=4), {}, "backends.cross_layer ... Ascend ... pool"),
        (Pool(kv_buffer=HOST, page_size=4), {}, "Ascend ... pool"),
        (Pool(layout="page_first_kv_split", kv_buffer=HOST), {}, "Ascend ... pool"),
        (Pool(layout="page_first", stores_page_envelope=True, head_num=1), {}, "keeps packed ... page rows"),
        (Pool(layout="page_first", kv_buffer=HOST), {}, "keeps packed ... whole blocks"),
        (Pool(layout="page_first", page_size=4, kv_lora_rank=512, kv_buffer=None), {}, "only allocates"),
        (
            Pool(layout="page_last", page_size=4, head_num=4, kv_buffer=HOST),
            {},
            "'page_last' ... 'layer_first' ... 'page_first'",
        ),
        (
            Pool(layout="page_head", page_size=4, kv_lora_rank=4, kv_buffer=HOST),
            {},
            "MLA ... 'page_head' ... 'layer_first' ... 'page_first'",
        ),
        (
            Pool(layout="page_unified", page_size=4, head_num=4, kv_buffer=(HOST, HOST)),
            {},
            "'page_unified' ... 'layer_first' ... 'page_first'",
        ),
        (
            Pool(**{**vars(mha_pool()), "kv_cache_layout": "page_major_layer_major"}),
            {},
            "kv_cache_layout ... 'page_major_layer_major' ... 'nhd' ... 'page_major' ... 'hnd'",
        ),
        ((K, K), {}, "tensors do not show their page_size"),
        ((K, K), {"page_size": 4, "layout": "first"}, "layout ... 'first' ... 'nhd' ... page_m"),
        (HOST, {"page_size": 4}, "one tensor ... give layout="),
        ((K, K), {"page_size": 4, "layout": "page_first"}, "'page_first' ... of 0 dims"),
        (
            HOST[0, 0],
            {"page_size": 4, "layout": "page_first"},
            "of 3 dims ... 'kv (block token) layer head dim' ... MLA",
        ),
        (HOST[0], {"page_size": 4, "layout": "page_head"}, "'kv block head token layer dim'"),
        ((K, K, K), {"page_size": 4}, "3 lists ... give two"),
        ([], {"page_size": 4}, "0 lists ... tensors"),
        (HOST, {"page_size": 5, "layout": "layer_first"}, "extent 16 ... token=5"),
        (K, {"page_size": 4}, "extent 4 ... 'layer: (block token) 1 dim' ... be 1"),
        (mla_pool(layers=4, owned=(1, 2), start=8), {"layers": [5, 7]}, "(5, 7) ... 4 ... without rows"),
        (INDEXED, {}, "3 pages of index keys ... 4 of latents"),
    ],
)
PAGES = rows(
    "sglang.describe",
    sglang.describe,
    LayoutError,
    [
        (Pool(kv_buffer=[BYTES], kv_buffer_rope=[None]), "keeps a ring ... pool.swa_pages"),
        (Pool(index_k_payload_buffer=[], index_head_dim=128), "FP4 keys ... two buffers"),
        (
            Pool(layout="page_first_direct", kv_buffer=BYTES, item_bytes=64),
            "KVLayout.from_tensors ... 'block layer 1 dim' ... pool.kv_buffer",
        ),
        (Pool(layout="layer_first", kv_buffer=[BYTES], state_page_bytes=64), "'layer: block dim' ... pool.kv_b"),
        (MAMBA_HOST, "keeps 1 kinds ... side state"),
        (MAMBA, "keeps 2 kinds ... side state"),
        (Pool(swa_kv_pool=1, kv_pools={4: 1}, index_pools={4: 1}), "swa_kv_pool ... kv_pools ... index_pools"),
    ],
)
ROWS += CPU + FORMS + PLACES + ROCM + SGLANG + PAGES
ROWS += rows("vllm.describe", nvfp4, LayoutError, [("LHBNC", "NVFP4 ... LBHNC"), ("BHLNC", "NVFP4 ... LBHNC")])
