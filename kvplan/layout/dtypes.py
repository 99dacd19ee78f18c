"""Element types: bytes per element, and kinds of numbers, by the names of types in torch, numpy and specs."""

from __future__ import annotations

import numpy as np

ITEMSIZE = {
    "int8": 1, "uint8": 1, "byte": 1, "bool": 1, "fp8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1, "e4m3": 1, "e5m2": 1,
    "int16": 2, "uint16": 2, "fp16": 2, "float16": 2, "half": 2, "bf16": 2, "bfloat16": 2,
    "int32": 4, "uint32": 4, "fp32": 4, "float32": 4, "float": 4,
    "int64": 8, "uint64": 8, "fp64": 8, "float64": 8, "double": 8,
}  # fmt: skip

_SHORT = {
    "float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2", "float16": "fp16", "half": "fp16", "bfloat16": "bf16",
    "float32": "fp32", "float": "fp32", "float64": "fp64", "double": "fp64",
}  # fmt: skip
_FLOATS = ("fp8", "e4m3", "e5m2", "fp16", "bf16", "fp32", "fp64")
_FP8 = ("e4m3", "e5m2")


def itemsize_of(dtype: str) -> int:
    """Return the bytes per element of a type; 1 if the name is not known, as of rarer formats of 8 bits.

    >>> itemsize_of("bf16"), itemsize_of("float8_e4m3fnuz"), itemsize_of("complex64")
    (2, 1, 8)
    """
    try:
        return ITEMSIZE.get(dtype) or np.dtype(dtype).itemsize
    except TypeError:
        return 1


def kind_of(dtype: str) -> str:
    """Return the number format of an element type in its short name; ``""`` for plain bytes.

    Integers and unknown types are plain bytes: engines keep bf16 pages in int8 rows, and fp8 caches as uint8.

    >>> kind_of("bfloat16"), kind_of("half"), kind_of("float8_e4m3fnuz"), kind_of("uint8")
    ('bf16', 'fp16', 'float8_e4m3fnuz', '')
    """
    short = _SHORT.get(dtype, dtype)
    return short if short in _FLOATS or short.startswith(("float8_", "float4_", "complex")) else ""


def agree(dtype: str, other: str) -> bool:
    """Return whether bytes of one element type may be read as the other: one is plain bytes, or the formats are equal.

    The name ``fp8`` stands for every format of 8 bits.

    >>> agree("bf16", "bfloat16"), agree("bf16", "uint8"), agree("fp8", "e5m2"), agree("bf16", "fp16")
    (True, True, True, False)
    """
    kind, found = kind_of(dtype), kind_of(other)
    if not kind or not found or kind == found:
        return True
    return any(
        one == "fp8" and (two in _FP8 or two.startswith("float8_")) for one, two in ((kind, found), (found, kind))
    )
