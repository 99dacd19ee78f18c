"""Tensors of vLLM as bytes: which of their dims are dense, and the four parts of an NVFP4 page.

Source: vLLM 0.33.0, ``v1/attention/backends/flashinfer.py`` (``_nvfp4_kv_views``), ``utils/torch_utils.py``
(``nvfp4_split_data_scale``), ``csrc/nvfp4_kv_cache_kernels.cu``.
"""

from __future__ import annotations

from typing import Any

from kvplan.backends._tensors import itemsize_of, steps_of
from kvplan.errors import LayoutError


def check_dense(form: str, cache: Any, *, dims: int = 2) -> None:
    """The last dims follow one another without a gap.

    Raises:
        LayoutError: a stride that leaves a gap or permutes them.
    """
    shape, steps = tuple(map(int, cache.shape[-dims:])), steps_of(cache)[-dims:]
    if not _dense(shape, steps, itemsize_of(cache)):
        expected = _steps(shape, itemsize_of(cache))
        raise LayoutError(f"the last {dims} dims, {shape}, have strides {steps} (bytes); {form} caches are dense "
                          f"there, {expected}, as in LBHNC")  # fmt: skip


def _steps(shape: tuple[int, ...], unit: int) -> tuple[int, ...]:
    steps = [unit]
    for extent in reversed(shape[1:]):
        steps.append(steps[-1] * extent)
    return tuple(reversed(steps))


def _dense(shape: tuple[int, ...], steps: tuple[int, ...], unit: int) -> bool:
    expected = _steps(shape, unit)
    return all(extent == 1 or step == want for extent, step, want in zip(shape, steps, expected, strict=True))


def holds_nvfp4(shape: tuple[int, ...], itemsize: int) -> bool:
    """Whether ``(B, H, N, C)`` is NVFP4: K and V have a slot a head, and a ninth of their bytes are scales.

    A page of one slot or of one row has one order, whatever it holds.

    >>> holds_nvfp4((10, 16, 16, 72), 1), holds_nvfp4((10, 1, 64, 132), 1)
    (True, False)
    """
    _, slots, tokens, content = shape
    return itemsize == 1 and slots > 1 and slots % 2 == 0 and tokens > 1 and content % 9 == 0


def nvfp4_parts(caches: list[Any], names: tuple[str, str]) -> list[tuple[str, str, list[Any], dict[str, int]]]:
    """K data, K scales, V data and V scales of every page, by head; each of them opaque.

    A page is one after the other of these four, and inside each the strides of the whole say whether heads or tokens
    are outside. Tokens are not told apart: the kernels of compute capability 10 keep V's scales in groups of four.

    Raises:
        LayoutError: a page that is not in one piece.
    """
    _, slots, tokens, content = map(int, caches[0].shape)
    heads, orders = slots // 2, []
    for order, dims in (("head dim.0 dim.1", (1, 2, 3)), ("dim.0 head dim.1", (2, 1, 3))):
        shape, steps = ([facts[k] for k in dims] for facts in (caches[0].shape, steps_of(caches[0])))
        if _dense(tuple(map(int, shape)), tuple(steps), 1):
            orders.append((order, dims))
    if not orders:
        raise LayoutError(
            f"form='whole_blocks' has an NVFP4 cache of shape {tuple(caches[0].shape)} and strides "
            f"{steps_of(caches[0])}; its pages are dense, as in LBHNC, LBNHC, BLHNC and BLNHC"
        )
    order, dims = orders[0]
    pages = [cache if dims == (1, 2, 3) else cache.swapaxes(1, 2) for cache in caches]
    pages = [page.reshape(int(page.shape[0]), -1) for page in pages]  # dense, so a view
    scale = content // 9
    found, start = [], 0
    for name in names:
        for suffix, row in (("", content - scale), ("_scale", scale)):
            stop = start + heads * tokens * row
            found.append((name + suffix, f"block ({order})", [page[:, start:stop] for page in pages],
                          {"head": heads, "dim.0": tokens, "dim.1": row}))  # fmt: skip
            start = stop
    return found
