"""Refusals of the adapters of vLLM's caches and SGLang's pools."""

from __future__ import annotations

from types import SimpleNamespace as Pool

import numpy as np
import torch

from kvplan import LayoutError
from kvplan.backends import sglang, vllm
from tests.backends.sglang.sglang_pools import dsa_pool, mha_pool, mla_pool
from tests.contract.refusals.table import REFUSED

FOUR = np.zeros((3, 2, 4, 16), np.int8)
FIVE = np.zeros((3, 2, 4, 2, 8), np.int8)
PLANES = np.zeros((2, 3, 4, 2, 32), np.int8)
SLOTS = {"form": "head_slots", "heads": 2}
LATENT = "model.layers.3.self_attn.attn"
BOTH = {LATENT: np.zeros((3, 1, 64, 656)), "layers.3.indexer.k_cache": np.zeros((3, 1, 64, 132))}
REFUSED["vllm.describe", lambda caches, more: vllm.describe(caches, **more), LayoutError] = [
    (FOUR, {"form": "NHD"}, "form ... 'NHD' ... 'fused' ... 'latent' ... 'packed' ... 'whole_blocks'"),
    ([FIVE], {}, "(3, 2, 4, 2, 8) ... form='fused' ... of 5 dims"),
    (FIVE[0, 0], {}, "(4, 2, 8) ... 3 dims ... form='fused'"),
    (FIVE, {"form": "planes"}, "dim 0 ... 3 ... form='planes' ... (2, B, N, H, D)"),
    (FIVE.swapaxes(0, 1), {"form": "pages"}, "dim 1 ... 3 ... form='pages'"),
    (FOUR, {"form": "head_slots"}, "form='head_slots' ... heads= ... 'paged' ... 'shuffled'"),
    (FOUR, {"heads": 2}, "form='fused' ... heads="),
    (FOUR, SLOTS | {"heads": 3}, "extent 16 ... head=3"),
    (FOUR, SLOTS | {"heads": 0}, "heads ... is 0 ... least 1"),
    (FOUR, {"form": "cpu", "head_size_v": 8}, "head_size_v ... form='cpu' ... 'fused'"),
    (FOUR, {"head_size_v": 16}, "head_size_v ... is 16 ... of 16 elements"),
    (FOUR, {"head_size_v": -1}, "head_size_v ... is -1 ... least 0"),
    (FOUR[:, :, ::2], SLOTS | {"form": "paged"}, "x-packed caches ... dense"),
    (FOUR, SLOTS | {"form": "shuffled"}, "of 4 token ... of 16"),
    (FIVE, {"form": "rocm"}, "dim 0 ... 3 ... form='rocm'"),
    (PLANES, {"form": "rocm", "heads": 2}, "form='rocm' ... no heads="),
    (PLANES[:, :, ::2], {"form": "shuffled_planes"}, "of 2 token ... of 16"),
    (PLANES[..., ::2], {"form": "rocm"}, "x-packed caches ... dense"),
    ([PLANES], {}, "of 5 dims are planes, pages, planes_hnd, rocm, shuffled_planes"),
    (FOUR, {"block_tokens": 6}, "block_tokens ... is 6 ... have 4 token"),
    (FOUR, {"form": "whole_blocks", "block_tokens": 6}, "is 6 ... of 4"),
    ("cache", {}, "kv_caches is a str ... dict of layer name"),
    (["cache"], {}, "kv_caches[0] is a str ... form='fused'"),
    ([], {}, "kv_caches holds no layer"),
    ({}, {}, "kv_caches holds no layer"),
    ([FOUR], {"names": ["a"]}, "kv_caches is a list ... names"),
    ({"layers.0": FOUR}, {"names": ["layers.1"]}, "'layers.1' ... kv_caches"),
    ({"attn": FOUR}, {}, "'attn' ... has 0 numbers"),
    ({"layers.0": FOUR}, {"layer_start": 3}, "layer_start ... is 3, and ... kv_caches"),
    ([FOUR], {"layers": [1, 2]}, "[1, 2] ... kv_caches ... holds 1"),
    (BOTH, {"form": "latent"}, f"{LATENT} ... k_cache ... both layer 3"),
    ({"layers.0.self_attn.1.attn": FOUR}, {}, "has 2 numbers ... layers="),
]

K = [np.zeros((16, 4, 8), np.float16) for _ in range(2)]
HOST = np.zeros((2, 3, 16, 4, 8), np.float16)
POOL = {"page_size": 4, "kv_buffer": HOST}
BYTES = torch.zeros(4, 2, 64, dtype=torch.uint8)
STATES = [torch.zeros(3, 5, 3, 8, dtype=torch.float16)], torch.zeros(3, 5, 2, 4, 4)
MAMBA = Pool(mamba_cache=Pool(conv=STATES[0], temporal=STATES[1]), mamba_layer_ids=[1, 3, 5], _slot_siblings=[1, 2])
MAMBA_HOST = Pool(
    layout="page_first",
    page_size=1,
    conv_buffer=[torch.zeros(7, 3, 1, 3, 8, dtype=torch.float16)],
    temporal_buffer=torch.zeros(7, 3, 1, 2, 4, 4),
    slot_state_buffers=[BYTES],
)
INDEXED = dsa_pool()
INDEXED.index_k_with_scale_buffer = [torch.zeros(3, 8448, dtype=torch.uint8) for _ in range(3)]
REFUSED["sglang.describe", lambda pool, more: sglang.describe(pool, **more), LayoutError] = [
    (Pool(full_kv_pool=1, swa_kv_pool=2), {}, "full_kv_pool ... swa_kv_pool"),
    (Pool(entries=[1], layout="page_first"), {}, "describe what ... entries holds"),
    (mha_pool(), {"layout": "nhd"}, "SimpleNamespace ... layout ... pool"),
    (mha_pool(), {"page_size": 4}, "page_size ... layout"),
    (Pool(page_size=4), {}, "'kv_buffer' ... SGLang"),
    (Pool(k_buffer=K, v_buffer=K), {}, "SimpleNamespace ... 'page_size'"),
    (Pool(kpool_use_compress=True), {}, "keeps kpool_use_compress ... from_tensors"),
    (Pool(k_buffer=HOST, page_size=4), {}, "one tensor ... Ascend"),
    (Pool(kv_buffer=HOST, page_size=4), {}, "one tensor ... Ascend"),
    (Pool(layout="page_first_kv_split", kv_buffer=HOST), {}, "keeps packed page rows"),
    (Pool(layout="page_first", stores_page_envelope=True, head_num=1), {}, "keeps stores_page_envelope"),
    (Pool(layout="page_first", kv_buffer=HOST), {}, "keeps packed page rows ... whole blocks"),
    (Pool(layout="page_first", page_size=4, kv_lora_rank=512, kv_buffer=None), {}, "only allocates"),
    (Pool(layout="page_last", head_num=4, **POOL), {}, "'page_last' ... 'layer_first' ... 'page_first'"),
    (Pool(layout="page_head", kv_lora_rank=4, **POOL), {}, "MLA ... 'page_head' ... 'layer_first' ... 'page_first'"),
    ((K, K), {}, "tensors do not show their page_size"),
    (HOST, {"page_size": 4}, "one tensor ... give layout="),
    ((K, K), {"page_size": 4, "layout": "page_first"}, "'page_first' ... of 0 dims"),
    (HOST[0, 0], {"page_size": 4, "layout": "page_first"}, "of 3 dims ... 'kv (block token) layer head dim' ... MLA"),
    ((K, K, K), {"page_size": 4}, "3 lists ... give two"),
    ([], {"page_size": 4}, "0 lists ... tensors"),
    (HOST, {"page_size": 5, "layout": "layer_first"}, "extent 16 ... token=5"),
    (mla_pool(layers=4, owned=(1, 2), start=8), {"layers": [5, 7]}, "(5, 7) ... 4 ... without rows"),
    (mla_pool(layers=4, owned=(1, 2), start=8), {"layers": 3}, "layers is 3 ... sequence of integers"),
    (INDEXED, {}, "3 pages of index keys ... 4 of latents"),
]
REFUSED["sglang.describe", sglang.describe, LayoutError] = [
    (Pool(kv_buffer=[BYTES], kv_buffer_rope=[None]), "keeps kv_buffer_rope"),
    (Pool(kv_buffer=[BYTES], kv_buffer_rope=BYTES), "keeps kv_buffer_rope"),
    (Pool(layout="layer_first", page_size=128, page_num=4, kv_buffer=BYTES), "keeps packed page rows"),
    (Pool(index_k_payload_buffer=[BYTES], index_head_dim=128), "keeps index_k_payload_buffer"),
    (Pool(layout="page_first_direct", kv_buffer=BYTES, item_bytes=64), "keeps item_bytes ... KVLayout.from_tensors"),
    (Pool(layout="layer_first", kv_buffer=[BYTES], state_page_bytes=64), "keeps state_page_bytes"),
    (MAMBA_HOST, "keeps side state"),
    (MAMBA, "keeps side state"),
]
