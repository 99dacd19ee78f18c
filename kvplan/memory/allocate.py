"""Allocate a pool for the content of another layout; the pool's notation may have another order of dims."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import prod
from os import PathLike
from typing import Any

import numpy as np

from kvplan.advise.advise import host_orders, parts_of
from kvplan.base.values import quoted
from kvplan.errors import HostMemoryError, LayoutError
from kvplan.layout.components import Pool
from kvplan.layout.kvlayout import KVLayout
from kvplan.layout.notation import PARTS, parse
from kvplan.layout.slicing import Heads
from kvplan.memory.pages import Pages, Wish, counted, layers_alike, pages, wanted_heads
from kvplan.memory.shared import attach, share
from kvplan.memory.shared_mappings import sealed_memory, shareable

log = logging.getLogger("kvplan")
AUTO = "auto"


def allocate(
    notation: str,
    *,
    like: KVLayout,
    num_blocks: int | None = None,
    block_tokens: int | None = None,
    layers: Iterable[int] | None = None,
    heads: Heads | None = None,
    device: str = "cpu",
    pin: bool | None = None,
    sizes: Mapping[str, int] | None = None,
    shared: str | PathLike[str] | bool | None = None,
) -> KVLayout:
    """Allocate memory for the layers, parts and heads of ``like``, in the order of ``notation``.

    torch allocates if ``like`` was made of torch tensors or the device is not the CPU; otherwise numpy allocates. The
    memory is not cleared.

    Args:
        notation: the pool's notation, for example ``"block layer kv token head dim"``; or ``"auto"`` for the order
            that moves in the fewest runs, then extents, as ``kvplan advise`` prints it. Axes may be split. Layers of
            several sizes share a page: in ``"block layer kv token head dim"``, those of each size stand together in
            every block; with ``layer`` left of a ``:``, each size has tensors of its own. For parts of several sizes
            and dtypes on one page, write the axes that all parts share, then the parts in the order of their bytes,
            each with its own axes, ``layer`` among them if layers have several sizes:
            ``"block layer | k v: head token dim | k_scale v_scale: head token"``.
        like: the layout whose content the pool will hold. Without ``|``, all its parts must have one size.
        num_blocks: number of blocks of the pool; by default the number of ``like``.
        block_tokens: token slots per block; by default the number of ``like``.
        layers: global numbers of the pool's layers, which may include other ranks' layers; by default ``like.layers``.
        heads: global numbers of the pool's KV heads, which may include other ranks' heads; by default ``like.heads``.
        device: ``"cpu"`` or a torch device such as ``"cuda:0"``.
        pin: whether to page-lock host memory, so that a GPU reaches it; by default, if torch allocates and reaches a
            GPU. ``True`` without one has no effect, and a warning is logged. The memory is registered in pieces of at
            most 32 GiB. The border between two pieces is a seam of the layout. If pinning fails, a warning is issued,
            and the pool is pageable.
        sizes: extents in elements of a split axis (``{"head.0": 4}``); or ``{"subblock": 4}``, the number of opaque
            blocks of ``like`` in one block of the pool.
        shared: a name in /dev/shm, or the absolute path of a file. Processes that give the same name or path share the
            memory. The first process makes the file, full of zeros; the last unlinks it. Only the memory that ``like``
            uses is pinned. See ``docs/guides/shared-pool.md``. ``True`` makes a pool without a name, full of zeros,
            which :class:`kvplan.Agent` can offer to other processes. Pinned pools can be offered in any case.

    Returns:
        The pool's layout. Its ``tensors`` are the allocated tensors, in nested lists if the notation has several; of a
        page with several parts, a list with the tensors of each.

    Raises:
        NotationError: the notation does not parse.
        LayoutError: the notation cannot hold ``like``, a size is invalid, torch has no such device, or the shared pool
            is in use with another geometry; then the message shows both.
        HostMemoryError: there is no space for a shared pool, or the file cannot be used as a pool.

    >>> import numpy as np
    >>> gpu = KVLayout.from_tensors("kv block token head dim", np.zeros((2, 8, 16, 2, 64), np.int8))
    >>> allocate("block layer kv token head dim", like=gpu, num_blocks=2, block_tokens=64)
    KVLayout('block layer kv token head dim | layer=1 kv=2 block=2 token=64 head=2 dim=64 | int8 on cpu')

    One page for values and their scales:

    >>> scale = KVLayout.from_tensors("kv block token head", np.zeros((2, 8, 16, 2), np.float32), part="scale")
    >>> pool = allocate("block | k v: head token dim | k_scale v_scale: head token", like=KVLayout.merge([gpu, scale]))
    >>> [pool.address(layer=0, part=part) - pool.address(layer=0, part="k") for part in pool.parts]
    [0, 2048, 4096, 4224]
    >>> [tensor.dtype.name for tensor in pool.tensors]
    ['int8', 'int8', 'float32', 'float32']
    """
    if not isinstance(notation, str):
        parse(notation)  # raises
    if not isinstance(like, KVLayout):
        raise LayoutError(f"like is a {type(like).__name__}; give the KVLayout whose content the pool will hold")
    if not isinstance(device, str) and type(device).__module__ != "torch":
        raise LayoutError(f"device is {quoted(device)}, which torch does not know; give 'cpu' or 'cuda:0'")
    layers = list(layers) if isinstance(layers, Iterable) else layers
    memory: dict[str, Any] = {"device": device, "pin": pin, "shared": shared}
    wish = Wish(num_blocks, block_tokens, layers, heads, dict(sizes or {}))
    if notation == AUTO:
        if sizes:
            raise LayoutError(f"sizes are {quoted(dict(sizes))}; 'auto' chooses the extents of split axes itself")
        return _in_best_order(like, wish, memory)
    alike = [like] if PARTS in notation or "layer" not in parse(notation).nesting else layers_alike(like)
    if len(alike) == 1:
        return _allocated(pages(notation, like, wish), like, **memory)
    if isinstance(shared, str | PathLike):
        why = "makes tensors of several sizes, and a pool with a name is one allocation"
        raise LayoutError(f"{quoted(notation)} {why}; write layer behind the ':'")
    if wish.layers is not None:
        raise LayoutError("the layers of like have several sizes; give no layers=, or slice like")
    wishes = [wish._replace(heads=heads if each.heads == like.heads else None) for each in alike]
    pools = [_allocated(pages(notation, *some), some[0], **memory) for some in zip(alike, wishes, strict=True)]
    return KVLayout.merge(pools)


def _in_best_order(like: KVLayout, wish: Wish, memory: dict[str, Any]) -> KVLayout:
    """Search the best order of a pool and allocate it: in one allocation, or in one for each of the parts that differ.

    Raises:
        LayoutError: no order of axes holds the content.
    """
    tokens = None if wish.block_tokens is None else counted("block_tokens", wish.block_tokens)
    heads = None if wish.heads is None else wanted_heads(wish.heads, like)
    single = isinstance(memory["shared"], str | PathLike)
    heads = heads if isinstance(heads, range) else None
    advice = host_orders(like, tokens, heads=heads, device=memory["device"], single=single)
    if not advice.orders:
        way = "give a notation, or allocate each part from like.slice(parts=...)"
        raise LayoutError(f"'auto' found no order of a pool for {like}: {advice.reason}; {way}")

    def pool(notation: str, own: KVLayout, sizes: dict[str, int]) -> KVLayout:
        # Opaque blocks move whole; scales have no heads, and an index has one of its own.
        return allocate(
            notation, like=own, num_blocks=wish.num_blocks, layers=wish.layers, sizes=sizes or None,
            block_tokens=None if own.opaque else tokens, heads=wish.heads if own.heads == like.heads else None,
            **memory,
        )  # fmt: skip

    best = advice.orders[0]
    if best.sizes is not None:
        return pool(best.notation, like, best.sizes)
    pools = []
    for spec in best.spec.get("layouts", [best.spec]):
        parts, layers = parts_of(spec), tuple(spec["layers"])
        whole = (set(parts), layers) == (set(like.parts), like.layers)
        sizes = {name: size for name, size in spec["sizes"].items() if "." in name or name == "subblock"}
        pools.append(pool(spec["notation"], like if whole else like.slice(parts=parts, layers=layers), sizes))
    return pools[0] if len(pools) == 1 else KVLayout.merge(pools)


# ---- memory ----------------------------------------------------------------------------------------------------------


def _allocated(
    pages: Pages, like: KVLayout, *, device: str, pin: bool | None, shared: str | PathLike[str] | bool | None
) -> KVLayout:
    """Allocate the pages of a pool and return its layout."""
    by_torch = device != "cpu" or any(type(r.owner).__module__.partition(".")[0] == "torch" for r in like.regions)
    if by_torch:
        import torch
    nbytes, count = prod(pages.outer) * pages.nbytes, prod(pages.counts)
    if shared and device != "cpu":
        raise LayoutError(f"device is {device!r}; a shared pool is CPU memory, so give 'cpu'")
    if device != "cpu":
        return pages.layout(_nest([_on_device(nbytes, device) for _ in range(count)], pages.counts))
    pinned = pin is not False and by_torch and torch.cuda.is_available()
    if pin and not pinned:
        why = "torch reaches no GPU" if by_torch else "numpy allocates, because 'like' holds no tensor of torch"
        log.warning("pin=True has no effect: %s; the pool is pageable", why)
    named = shared is not None and not isinstance(shared, bool)
    memory = share(shared, str(pages), [nbytes] * count) if named else None
    arrays = memory.tensors if memory else [_bytes(nbytes, shared=bool(shared), pinned=pinned) for _ in range(count)]
    pool = pages.layout(_nest([torch.from_numpy(array) if by_torch else array for array in arrays], pages.counts))
    if memory is not None:
        address = int(memory.memory.ctypes.data)
        name = Pool(memory.path, str(pages), count, nbytes, memory.token, address, attach_pool)
        regions = tuple(replace(region, pool=name) for region in pool.regions)
        pool = KVLayout(pool.built._replace(regions=regions), tensors=pool.tensors)
    if not pinned:
        return pool
    from kvplan.memory.pinning import pin_used

    ordinal = int(like.device.partition(":")[2] or 0) if like.device.startswith("cuda") else 0
    used = pool.slice(layers=like.layers) if memory else pool
    if memory and any(component.form.headed for component in used.components):
        with contextlib.suppress(LayoutError):  # heads cross a boundary of a split axis: pin all heads
            used = used.slice(heads=like.heads)
    try:
        owners, page = ([memory.memory], memory.page) if memory else (arrays, 4096)
        return pin_used(pool, used, owners, page, ordinal)
    except RuntimeError as error:
        part = "this process's part of " if memory else ""
        warnings.warn(f"could not pin {part}{pool.nbytes} bytes, so the pool is pageable: {error}", stacklevel=3)
        return pool


def _bytes(nbytes: int, *, shared: bool, pinned: bool) -> Any:
    """Return an array of bytes: of zeros that other processes can map if it is shared or pinned."""
    try:
        if not shared and not pinned:
            return np.empty(nbytes, np.uint8)
        # A pinned mapping is shared, too: after a fork, the parent would get a copy of a private page.
        return np.frombuffer((sealed_memory if shared else shareable)(nbytes), np.uint8)
    except (OSError, ValueError, MemoryError, OverflowError) as error:
        raise HostMemoryError(f"cannot allocate {nbytes:,} bytes for a pool ({error}); take fewer blocks") from error


def _on_device(nbytes: int, device: str) -> Any:
    import torch

    try:
        return torch.empty(nbytes, dtype=torch.uint8, device=device)
    except (AssertionError, RuntimeError, NotImplementedError, TypeError) as error:
        why = str(error).partition("\n")[0]
        way = "give 'cpu', a GPU of this machine, or fewer blocks"
        raise LayoutError(f"device is {quoted(str(device))}: no {nbytes:,} bytes for a pool ({why}); {way}") from None


def _nest(flat: Sequence[Any], counts: Sequence[int]) -> Any:
    """Nest a list by the given lengths, outermost first; if there are no lengths, return its only tensor."""
    level = list(flat)
    for count in reversed(counts):
        level = [level[at : at + count] for at in range(0, len(level), count)]
    return level[0]


def attach_pool(pool: Pool) -> tuple[int, Any] | None:
    """Map a pool that a pickle names; return its address here and its memory, or None if no process uses the pool."""
    here = attach(pool.path, pool.geometry, [pool.nbytes] * pool.tensors, pool.token)
    return None if here is None else (int(here.memory.ctypes.data), here.memory)
