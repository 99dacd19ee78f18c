"""Cross-layer: one tensor for all layers, with its dims in any order.

Source: vLLM 0.33.0, ``v1/kv_cache_layout.py``. Its storage orders with blocks outermost (BLHNC, BLNHC, BHLNC) are
cross-layer; there K and V are fused in the content. TensorRT-LLM 1.2 and FlexKV keep ``block layer kv ...`` pools.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Unpack

from kvplan.backends._tensors import Numbers, check_numbers
from kvplan.errors import LayoutError
from kvplan.layout.kvlayout import KVLayout

NOTATION = "block layer kv token head dim"


def describe(
    tensor: Any, notation: str = NOTATION, *, sizes: Mapping[str, int] | None = None, **numbers: Unpack[Numbers]
) -> KVLayout:
    """Describe one tensor that holds all layers.

    Args:
        tensor: its dims are in the order of ``notation``, extents in elements. Its real strides are used.
        notation: the name of every dim, with ``layer`` among them, and without a colon.
        sizes: extents that the shape does not give (``{"token": 16}`` of ``(block token)``).
        numbers: ``layer_start``, ``head_start``, ``layers``, ``part``, ``seams``, as
            :meth:`kvplan.KVLayout.from_tensors` takes them.

    Raises:
        NotationError: the notation does not parse.
        LayoutError: the dims lack ``layer``, the notation has a nesting, there are several tensors, or the shape does
            not fit the notation.

    >>> import numpy as np
    >>> print(describe(np.zeros((8, 32, 2, 16, 4, 64), np.float16)))
    block layer kv token head dim | layer=32 kv=2 block=8 token=16 head=4 dim=64 | float16 on cpu
    >>> print(describe(np.zeros((8, 4, 32, 16, 128), np.float16), "block head layer token (kv dim)", head_start=4))
    block head layer token (kv dim) | layer=32 kv=2 block=8 token=16 head=4 dim=64 | float16 on cpu | heads 4-7
    """
    check_numbers(numbers)
    if ":" in str(notation):
        raise LayoutError(
            f"'{notation}' nests tensors; cross-layer is one tensor, so write every axis as a dim, without ':'"
        )
    if "layer" not in str(notation):
        raise LayoutError(f"'{notation}' has no layer dim; cross-layer is one tensor for all layers, as '{NOTATION}'")
    if not hasattr(tensor, "shape"):
        raise LayoutError(f"tensor is a {type(tensor).__name__}; cross-layer is one tensor for all layers")
    return KVLayout.from_tensors(notation, tensor, sizes=sizes, **numbers)
