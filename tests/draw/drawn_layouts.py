"""Specs that the tests of pictures draw: the examples, and layouts with padding and woven strides."""

from __future__ import annotations

from tests.commands import SPECS

BLOCK = {"block": 64, "token": 16, "head": 2, "dim": 128}


PADDED_PAGE = {"notation": "layer: kv block token head dim", "dtype": "bf16", "device": "cuda:0",
               "strides": [64 * 4224, 4224, 256, 128, 1], "sizes": {"layer": 32, **BLOCK}}  # fmt: skip


HYBRID = {"layouts": [
    {"notation": "block layer kv token head dim", "dtype": "bf16", "strides": [65536, 8192, 4096, 256, 128, 1],
     "address": 4096, "sizes": {"layer": 6, **BLOCK}},
    {"notation": "block layer dim", "dtype": "uint8", "part": "state", "strides": [131072, 8192, 1],
     "address": 4096 + 6 * 16384, "layers": [6, 7], "sizes": {"layer": 2, "block": 64, "dim": 8000}},
]}  # fmt: skip


SCALES = {"layouts": [
    {"notation": "layer: block kv token head dim", "dtype": "fp8", "address": 4096, "sizes": {"layer": 32, **BLOCK}},
    {"notation": "layer: block kv token head dim", "dtype": "fp32", "part": "scale", "address": 1 << 33,
     "sizes": {"layer": 32, **BLOCK, "dim": 1}},
]}  # fmt: skip


MANY = {"layouts": [{"notation": "layer: block token dim", "part": f"a_part_of_a_long_name_{k}", "dtype": "uint8",
                     "address": 4096 + 64 * k, "strides": [16 * 1024, 1024, 1],
                     "sizes": {"layer": 1, "block": 64, "token": 16, "dim": 40 + k}} for k in range(9)]}  # fmt: skip


# Tokens 24 bytes apart, heads 16: neither steps over all of the other.
WOVEN = {"notation": "block token head dim", "dtype": "uint8", "strides": [256, 24, 16, 1],
         "sizes": {"block": 2, "token": 2, "head": 3, "dim": 4}}  # fmt: skip


CASES = {path.stem: path for path in sorted(SPECS.iterdir())} | {
    "padded_page": PADDED_PAGE, "hybrid": HYBRID, "scales": SCALES, "many": MANY, "woven": WOVEN
}  # fmt: skip
