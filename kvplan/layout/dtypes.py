"""Bytes per element, by the names of types in torch, numpy and specs."""

from __future__ import annotations

ITEMSIZE = {
    "int8": 1, "uint8": 1, "byte": 1, "bool": 1, "fp8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1, "e4m3": 1, "e5m2": 1,
    "int16": 2, "uint16": 2, "fp16": 2, "float16": 2, "half": 2, "bf16": 2, "bfloat16": 2,
    "int32": 4, "uint32": 4, "fp32": 4, "float32": 4, "float": 4,
    "int64": 8, "uint64": 8, "fp64": 8, "float64": 8, "double": 8,
}  # fmt: skip
