"""Tensors of vLLM as bytes: check that dims are contiguous, and cut NVFP4 pages into their four parts.

Source: vLLM 0.33.0, ``v1/attention/backends/flashinfer.py`` (``_nvfp4_kv_views``), ``utils/torch_utils.py``
(``nvfp4_split_data_scale``), ``csrc/nvfp4_kv_cache_kernels.cu``.
"""

from __future__ import annotations

from typing import Any

from kvplan.backends._tensors import dense, itemsize_of, steps_of
from kvplan.errors import LayoutError


def check_dense(form: str, cache: Any, *, dims: int = 2) -> None:
    """Check that the last dims are contiguous.

    Raises:
        LayoutError: a stride leaves a gap, or permutes the dims.
    """
    shape, steps = tuple(map(int, cache.shape[-dims:])), steps_of(cache)[-dims:]
    if not dense(shape, steps, itemsize_of(cache)):
        expected = _steps(shape, itemsize_of(cache))
        raise LayoutError(f"the last {dims} dims, {shape}, have strides {steps} (bytes); {form} caches are dense "
                          f"there, {expected}, as in LBHNC")  # fmt: skip


def _steps(shape: tuple[int, ...], unit: int) -> tuple[int, ...]:
    steps = [unit]
    for extent in reversed(shape[1:]):
        steps.append(steps[-1] * extent)
    return tuple(reversed(steps))


def holds_nvfp4(shape: tuple[int, ...], itemsize: int) -> bool:
    """Return whether ``(B, H, N, C)`` is NVFP4: K and V have a slot per head, and a ninth of their bytes are scales.

    A page of one slot or of one row has only one order, so the answer does not matter for it.

    >>> holds_nvfp4((10, 16, 16, 72), 1), holds_nvfp4((10, 1, 64, 132), 1)
    (True, False)
    """
    _, slots, tokens, content = shape
    return itemsize == 1 and slots > 1 and slots % 2 == 0 and tokens > 1 and content % 9 == 0


def nvfp4_parts(caches: list[Any], names: tuple[str, str]) -> list[tuple[str, str, list[Any], dict[str, int]]]:
    """Cut every page into K data, K scales, V data and V scales, by head; each of them is opaque.

    A page holds these four parts one after the other. The strides of the page show whether heads or tokens are the
    outer axis of each part. Tokens are not separated: kernels of compute capability 10 keep V's scales
    in groups of four.

    Raises:
        LayoutError: a page is not contiguous.
    """
    _, slots, tokens, content = map(int, caches[0].shape)
    heads, orders = slots // 2, []
    for order, dims in (("head dim.0 dim.1", (1, 2, 3)), ("dim.0 head dim.1", (2, 1, 3))):
        shape, steps = ([facts[k] for k in dims] for facts in (caches[0].shape, steps_of(caches[0])))
        if dense(tuple(map(int, shape)), steps, 1):
            orders.append((order, dims))
    if not orders:
        raise LayoutError(
            f"form='whole_blocks' has an NVFP4 cache of shape {tuple(caches[0].shape)} and strides "
            f"{steps_of(caches[0])}; its pages are dense, as in LBHNC, LBNHC, BLHNC and BLNHC"
        )
    order, dims = orders[0]
    pages = [cache if dims == (1, 2, 3) else cache.swapaxes(1, 2) for cache in caches]
    pages = [page.reshape(int(page.shape[0]), -1) for page in pages]  # contiguous, so a view
    scale = content // 9
    found, start = [], 0
    for name in names:
        for suffix, row in (("", content - scale), ("_scale", scale)):
            stop = start + heads * tokens * row
            found.append((name + suffix, f"block ({order})", [page[:, start:stop] for page in pages],
                          {"head": heads, "dim.0": tokens, "dim.1": row}))  # fmt: skip
            start = stop
    return found
