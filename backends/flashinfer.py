"""FlashInfer: paged caches with K and V inside the page, or as a tuple; NHD or HND.

Source: FlashInfer 0.7.2, ``decode.py`` (``BatchDecodeWithPagedKVCacheWrapper.run``) and ``utils.py``
(``TensorLayout``, ``_unpack_paged_kv_cache``). Its pages are kvplan's blocks.
"""

from __future__ import annotations

from typing import Any, Unpack

from kvplan.backends._tensors import PAGE, Numbers, check_numbers, check_option, layers_of
from kvplan.layout.kvlayout import KVLayout

_SHAPE = {"NHD": "page_tokens, heads, head_dim", "HND": "heads, page_tokens, head_dim"}


def describe(kv_caches: Any, *, kv_layout: str = "NHD", **numbers: Unpack[Numbers]) -> KVLayout:
    """Describe the paged caches that FlashInfer's wrappers read, one entry per layer.

    The rank distinguishes combined caches from tuples. NHD and HND have equal ranks, so ``kv_layout`` names the order.
    Pass a list of all K caches and a list of all V caches as ``list(zip(k_caches, v_caches))``. The scales of an NVFP4
    cache (``kv_cache_sf``, float8, head_dim / 16) have the same form: describe them with ``part="scale"``, and
    ``KVLayout.merge`` both layouts.

    Args:
        kv_caches: a list or tuple with one entry per layer, in order of layers, all of one form: a tensor ``(num_pages,
            2, page_tokens, heads, head_dim)`` (NHD) or ``(num_pages, 2, heads, page_tokens, head_dim)`` (HND), or a
            pair ``(k_cache, v_cache)`` of the same without the 2. A single tensor or pair is one layer.
        kv_layout: ``"NHD"`` or ``"HND"``, as given to the wrapper.
        numbers: ``layer_start``, ``head_start``, ``layers``, ``part``, ``seams``, as
            :meth:`kvplan.KVLayout.from_tensors` takes them.

    Raises:
        LayoutError: an unknown kv_layout, a wrong rank, a second extent other than 2, mixed forms, or K and V of
            different shapes or strides.

    >>> import numpy as np
    >>> print(describe([np.zeros((8, 2, 4, 16, 64), np.float16)], kv_layout="HND"))
    layer: block kv head token dim | layer=1 kv=2 block=8 token=16 head=4 dim=64 | float16 on cpu
    >>> pages, scales = np.zeros((8, 2, 16, 4, 64), np.uint8), np.zeros((8, 2, 16, 4, 8), np.uint8)
    >>> nvfp4 = KVLayout.merge([describe(pages), describe(scales, part="scale")])
    >>> nvfp4.parts, nvfp4.block_nbytes
    (('k', 'v', 'k_scale', 'v_scale'), 9216)
    """
    check_numbers(numbers)
    check_option("kv_layout", kv_layout, PAGE)
    expected = (
        f"in {kv_layout} a layer is one tensor (num_pages, 2, {_SHAPE[kv_layout]}), or a pair of K and V, each "
        f"(num_pages, {_SHAPE[kv_layout]})"
    )
    entries, paired = layers_of(kv_caches, kv_dim=1, expected=expected, other="flash_attention")
    notation = "layer kv: block " if paired else "layer: block kv "
    return KVLayout.from_tensors(notation + PAGE[kv_layout], entries, **numbers)
