"""Allocate a pool that holds what another layout holds, in an order of its own."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np

from kvplan.algebra import extent
from kvplan.errors import LayoutError
from kvplan.layout import KVLayout
from kvplan.notation import Notation, parse
from kvplan.spec import ITEMSIZE, extents_of, shape_of


def allocate(
    notation: str,
    *,
    like: KVLayout,
    num_blocks: int | None = None,
    block_tokens: int | None = None,
    device: str = "cpu",
    pin: bool = True,
    sizes: Mapping[str, int] | None = None,
) -> KVLayout:
    """Allocate memory for the layers, parts and heads of ``like``, in the order of ``notation``.

    torch allocates where ``like`` was made of torch tensors or the device is no CPU; numpy does otherwise. The memory
    is not cleared.

    Args:
        notation: order of the pool, for example ``"block layer kv token head dim"``.
        like: the layout whose content it will hold; all its parts of one size. For parts that differ (scales beside
            K and V), allocate each from ``like.slice(parts=...)`` and merge.
        num_blocks: blocks of the pool; by default as many as ``like`` has.
        block_tokens: token slots of a block; by default those of ``like``.
        device: ``"cpu"`` or a torch device such as ``"cuda:0"``.
        pin: page-lock host memory so that a GPU reaches it; means nothing where torch has no GPU. The memory is
            registered in pieces of at most 32 GiB that end on boundaries of the outermost dim where these are page
            boundaries; what lies between two is a seam of the layout. Where pinning fails, a warning says so and the
            pool is pageable.
        sizes: extents in elements of a split axis (``{"head.0": 4}``).

    Returns:
        A layout; its ``tensors`` holds what was allocated, nested as the notation says.

    Raises:
        NotationError, LayoutError: a notation that cannot hold ``like``, or a size that is none.

    >>> import numpy as np
    >>> gpu = KVLayout.from_tensors("kv block token head dim", np.zeros((2, 8, 16, 2, 64), np.int8))
    >>> allocate("block layer kv token head dim", like=gpu, num_blocks=2, block_tokens=64)
    KVLayout('block layer kv token head dim | layer=1 kv=2 block=2 token=64 head=2 dim=64 | int8 on cpu')
    """
    parsed = parse(notation)
    if not isinstance(like, KVLayout):
        raise LayoutError(f"like is a {type(like).__name__}; it is the layout whose content the pool will hold")
    part, content = _parts(parsed, like)
    dtype, itemsize = _dtype(like, content)
    axes = {
        "layer": len(like.layers),
        "block": like.num_blocks if num_blocks is None else num_blocks,
        "token": like.block_tokens if block_tokens is None else block_tokens,
        "head": len(like.heads),
        "dim": content // itemsize,
    }
    for name in ("num_blocks", "block_tokens"):
        value = axes["block" if name == "num_blocks" else "token"]
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise LayoutError(f"{name} is {value!r}; a pool has at least one")
    for axis, size in axes.items():
        if size != 1 and axis not in parsed.axes:
            raise LayoutError(f"'{parsed}' has no {axis!r} axis, and {size} of them to hold")
    extents = extents_of(parsed, {k: v for k, v in axes.items() if k in parsed.axes} | dict(sizes or {}))
    for axis, size in axes.items():
        atoms = [str(atom) for atom in parsed.factors(axis)]
        if atoms and prod(extents[name] for name in atoms) != size:
            raise LayoutError(f"sizes make {axis} {prod(extents[name] for name in atoms)}; the pool needs {size}")
    shape = shape_of(parsed, extents)
    counts = [extents[axis] for axis in parsed.nesting]
    seams: list[int] = []
    ordinal = (int(like.device.partition(":")[2] or 0) if like.device.startswith("cuda") else 0) if pin else None
    flat = list(
        _tensors(shape, prod(counts), dtype, seams, device=device, pin=ordinal, torch=_wants_torch(like, device))
    )
    told = {k: v for k, v in extents.items() if k != "kv" and k not in parsed.nesting}
    return KVLayout.from_tensors(
        notation,
        _nest(flat, counts),
        sizes=told,
        layers=like.layers,
        head_start=like.heads.start,
        part=part,
        seams=seams,
    )


def _parts(notation: Notation, like: KVLayout) -> tuple[str, int]:
    """Name to give the content, and its bytes a (token, head)."""
    sizes = {extent(c.form.dim) for c in like.components}
    heads = {extent(c.form.head) for c in like.components}
    if len(sizes) > 1 or len(heads) > 1:
        raise LayoutError(
            f"parts {like.parts} hold {sorted(sizes)} bytes a (token, head) and {sorted(heads)} heads: one notation "
            "holds parts of one size; allocate each from like.slice(parts=...) and merge"
        )
    if len(like.components) != len(like.layers) * len(like.parts):
        raise LayoutError(f"not every layer of {like} holds every part; allocate each part from its own slice")
    if "kv" not in notation.axes:
        if len(like.parts) != 1:
            raise LayoutError(f"'{notation}' has no kv axis, and parts {like.parts} to hold; write kv, as in (kv dim)")
        return like.parts[0], sizes.pop()
    pair = like.parts
    for name in ("kv", *(part.removeprefix("k_") for part in pair)):
        if pair == (("k", "v") if name == "kv" else (f"k_{name}", f"v_{name}")):
            return name, sizes.pop()
    raise LayoutError(f"'{notation}' has a kv axis, which holds parts ('k', 'v'); like holds {pair}")


def _dtype(like: KVLayout, content: int) -> tuple[str, int]:
    """Element type of the pool: that of ``like`` where it divides the content, else bytes."""
    itemsize = ITEMSIZE.get(like.dtype)
    return (like.dtype, itemsize) if itemsize and content % itemsize == 0 else ("uint8", 1)


def _wants_torch(like: KVLayout, device: str) -> bool:
    owners = [type(region.owner).__module__.partition(".")[0] for region in like.regions]
    return device != "cpu" or "torch" in owners


def _tensors(
    shape: Sequence[int], count: int, dtype: str, seams: list[int], *, device: str, pin: int | None, torch: bool
) -> Iterator[Any]:
    if torch:
        yield from _torch_tensors(shape, count, dtype, device, seams, pin=pin)
        return
    try:
        element = np.dtype(dtype)
    except TypeError:  # bfloat16, fp8: numpy has none, so the last dim counts bytes
        yield from _byte_views(shape, count, ITEMSIZE[dtype])
        return
    for _ in range(count):
        yield np.empty(shape, element)


def _byte_views(shape: Sequence[int], count: int, itemsize: int) -> Iterator[Any]:
    """Unsigned integers of the element's width stand in for types that numpy lacks."""
    for _ in range(count):
        yield np.empty(shape, np.dtype(f"u{itemsize}"))


def _torch_tensors(
    shape: Sequence[int], count: int, dtype: str, device: str, seams: list[int], *, pin: int | None
) -> Iterator[Any]:
    """Tensors of torch; of host memory, pinned for GPU number ``pin``. ``seams`` gathers what registrations leave."""
    import torch

    element = getattr(torch, dtype, torch.uint8)
    pinned = pin if device == "cpu" and torch.cuda.is_available() else None
    nbytes = prod(shape) * element.itemsize
    for _ in range(count):
        if pinned is not None:
            try:
                memory, ends = _pinned(nbytes, nbytes // shape[0], pinned)
                seams += ends
                yield torch.from_numpy(memory).view(element).view(tuple(shape))
                continue
            except RuntimeError as error:
                pinned = None
                warnings.warn(f"could not pin {nbytes} bytes, the pool is pageable: {error}", stacklevel=4)
        yield torch.empty(tuple(shape), dtype=element, device=device)


def _pinned(nbytes: int, row: int, ordinal: int) -> tuple[Any, tuple[int, ...]]:
    from kvplan.execute.pinning import pinned

    return pinned(nbytes, row, ordinal)


def _nest(flat: Sequence[Any], counts: Sequence[int]) -> Any:
    """Nested lists of the given lengths, outermost first; the only tensor where there are none."""
    level = list(flat)
    for count in reversed(counts):
        edges = range(0, len(level) + 1, count)
        level = [level[a:b] for a, b in pairwise(edges)]
    return level[0]
