"""Whole files of every kind that kvplan reads, to be broken."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import numpy as np

from kvplan import KVLayout
from kvplan.cost.profile import default
from kvplan.layout.dump import document_of

SPECS: tuple[dict[str, Any], ...] = (
    {"notation": "layer: kv block token head dim", "dtype": "bf16", "device": "cuda:0", "head_start": 4,
     "sizes": {"layer": 3, "block": 8, "token": 16, "head": 2, "dim": 8}},
    {"notation": "block layer kv token head dim", "dtype": "fp8", "address": 1 << 40, "layers": [3, 1],
     "sizes": {"layer": 2, "block": 5, "token": 4, "head": 3, "dim": 8}, "seams": [1 << 40]},
    {"notation": "layer: kv block head dim.0 token dim.1", "dtype": "fp16",
     "sizes": {"layer": 2, "block": 4, "token": 8, "head": 2, "dim": 32, "dim.1": 8}},
    {"notation": "block token dim", "part": "ckv", "strides": [1280, 72, 1],
     "sizes": {"block": 9, "token": 16, "dim": 64}},
    {"notation": "block: layer token dim", "dtype": "uint8", "sizes": {"layer": 2, "block": 6, "token": 2, "dim": 48}},
    {"layouts": [
        {"notation": "layer: block token dim", "sizes": {"layer": 2, "block": 4, "token": 4, "dim": 8}},
        {"notation": "layer: block dim", "dtype": "uint8", "part": "state",
         "sizes": {"layer": 2, "block": 4, "dim": 24}},
    ]},
)  # fmt: skip
PLAIN = {"model_type": "llama", "num_hidden_layers": 4, "num_attention_heads": 32, "hidden_size": 4096,
         "num_key_value_heads": 8}  # fmt: skip
CONFIGS: tuple[dict[str, Any], ...] = (
    PLAIN,
    PLAIN | {"layer_types": ["full_attention", "sliding_attention"] * 2, "sliding_window": 4096, "head_dim": 64},
    PLAIN | {"sliding_window": 4096, "use_sliding_window": True, "max_window_layers": 2, "model_type": "qwen2"},
    PLAIN | {"sliding_window": 512, "sliding_window_pattern": 2},
    PLAIN | {"model_type": "jamba", "attn_layer_period": 4, "attn_layer_offset": 2, "mamba_d_state": 16,
             "mamba_expand": 2, "mamba_d_conv": 4},
    PLAIN | {"full_attention_interval": 2, "linear_num_value_heads": 4, "linear_num_key_heads": 2,
             "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4},
    {"text_config": {"num_hidden_layers": 4, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_head_dim": 128,
                     "indexer_types": ["full"] * 4}},
)  # fmt: skip


@cache
def dumps() -> tuple[dict[str, Any], ...]:
    """Dumps of made-up layouts and of arrays, merged, sliced, and with blocks in allocations of their own."""
    made = [KVLayout.from_spec(spec) for spec in SPECS]
    rows = np.zeros((8, 2, 4, 3, 16), np.float16)
    kv = KVLayout.from_tensors("block kv token head dim", rows, head_start=6)
    scale = KVLayout.from_tensors("block token dim", np.zeros((8, 4, 4), np.uint8), part="scale")
    state = KVLayout.from_tensors("block: dim", [np.zeros(100, np.int8) for _ in range(8)], part="state", layers=[3])
    merged = KVLayout.merge([kv, scale, state])
    split = KVLayout.from_tensors("block head dim.0 token dim.1", np.zeros((4, 2, 4, 8, 8), np.int8))
    made += [kv, merged, merged.slice(parts=["scale"]), kv.slice(heads=range(7, 9), parts=["v"]), split]
    return tuple(json.loads(json.dumps(document_of(layout.built))) for layout in made)


def profile() -> dict[str, Any]:
    """A device profile."""
    made: dict[str, Any] = json.loads(default().to_json())
    return made


def pool(page: int, geometry: str, nbytes: int) -> bytes:
    """The file of a shared pool that is ready."""
    header = b"kvplan.pool\nwhole.\n" + geometry.encode() + b"\n"
    return header.ljust(page, b"\0") + bytes(nbytes)
