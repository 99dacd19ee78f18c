"""Layouts that nobody here has met, small enough to check by hand, at addresses that are easy to read."""

from __future__ import annotations

import numpy as np

from kvplan import KVLayout

GPU = 0x7F00_0000_0000


def padded_split_kv() -> KVLayout:
    """K and V planes of 3 pages of 64 bytes (4 tokens, 2 heads, 8 bytes), each followed by 16 bytes of padding."""
    return KVLayout.from_spec({
        "notation": "layer: kv block token head dim", "dtype": "uint8", "device": "cuda:0", "address": GPU,
        "sizes": {"layer": 2, "block": 3, "token": 4, "head": 2, "dim": 8}, "strides": [256, 80, 16, 8, 1],
    })  # fmt: skip


def mla_656() -> KVLayout:
    """Rows of 656 bytes, 704 apart."""
    return KVLayout.from_spec({
        "notation": "layer: block token dim", "dtype": "uint8", "device": "cuda:0", "address": GPU,
        "sizes": {"layer": 2, "block": 4, "token": 4, "dim": 656}, "strides": [2816, 704, 1],
    })  # fmt: skip


def token_major() -> KVLayout:
    """A host pool whose tokens hold all 3 layers: K of all tokens, then V."""
    return KVLayout.from_spec({
        "notation": "kv (block token) layer head dim", "dtype": "uint8", "address": 4096,
        "sizes": {"layer": 3, "block": 4, "token": 4, "head": 2, "dim": 8},
    })  # fmt: skip


def overlaid() -> tuple[KVLayout, KVLayout]:
    """Two groups of a hybrid model over the same pages of 256 bytes: attention in 2 layers, a state of 200."""
    memory = np.zeros((6, 256), np.uint8)
    attention = KVLayout.from_tensors("block layer kv token dim", memory.reshape(6, 2, 2, 4, 16), layers=[0, 2])
    state = KVLayout.from_tensors("block dim", memory[:, :200], part="state", layer_start=1)
    return attention, state
