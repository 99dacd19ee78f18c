"""Allocate a pool for the content of another layout; the pool's notation may have another order of dims."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from os import PathLike

from kvplan.advise.advise import Wanted
from kvplan.base.quoting import quoted
from kvplan.errors import LayoutError
from kvplan.layout.kvlayout import KVLayout
from kvplan.layout.notation import parse
from kvplan.memory.best_order import AUTO, allocated
from kvplan.memory.one_page import PARTS, page_of
from kvplan.memory.pool_content import Asked, content_of, counted, heads_of
from kvplan.memory.pool_memory import Tensors, made


def allocate(
    notation: str,
    *,
    like: KVLayout,
    num_blocks: int | None = None,
    block_tokens: int | None = None,
    layers: Iterable[int] | None = None,
    heads: range | None = None,
    device: str = "cpu",
    pin: bool = True,
    sizes: Mapping[str, int] | None = None,
    shared: str | PathLike[str] | bool | None = None,
) -> KVLayout:
    """Allocate memory for the layers, parts and heads of ``like``, in the order of ``notation``.

    torch allocates if ``like`` was made of torch tensors or the device is not the CPU; otherwise numpy allocates. The
    memory is not cleared.

    Args:
        notation: the pool's notation, for example ``"block layer kv token head dim"``; or ``"auto"`` for the order
            that moves in the fewest runs, then extents, as ``kvplan advise`` prints it. Axes may be split. Parts or
            layers of different shapes get one page for all, or an allocation each; a shared pool with a name is one
            allocation. For parts of several sizes and dtypes on one page, write the axes
            that all parts share, then the parts in the order of their bytes, each with its own axes:
            ``"block layer | k v: head token dim | k_scale v_scale: head token"``. If layers have several shapes, write
            ``layer`` behind the ``|``: those of each shape then stand together.
        like: the layout whose content the pool will hold. Without ``|``, all its parts must have one size.
        num_blocks: number of blocks of the pool; by default the number of ``like``.
        block_tokens: token slots per block; by default the number of ``like``.
        layers: global numbers of the pool's layers, which may include other ranks' layers; by default ``like.layers``.
        heads: global numbers of the pool's KV heads, which may include other ranks' heads; by default ``like.heads``.
        device: ``"cpu"`` or a torch device such as ``"cuda:0"``.
        pin: whether to page-lock host memory, so that it is reachable from a GPU; without effect if torch has no GPU.
            The memory is registered in pieces of at most 32 GiB, which end between rows of the outermost dim if these
            ends are page boundaries. The border between two pieces is a seam of the layout. If pinning fails, a warning
            is issued, and the pool is pageable.
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
    if not isinstance(like, KVLayout):
        raise LayoutError(f"like is a {type(like).__name__}; give the KVLayout whose content the pool will hold")
    if notation == AUTO:
        if sizes:
            raise LayoutError(f"sizes are {quoted(dict(sizes))}; 'auto' chooses the extents of split axes itself")
        wanted = _wanted(like, block_tokens, heads, device)._replace(single=isinstance(shared, str | PathLike))
        alike = partial(
            allocate, num_blocks=num_blocks, layers=tuple(layers) if isinstance(layers, Iterable) else layers,
            device=device, pin=pin, shared=shared,
        )  # fmt: skip
        return allocated(like, wanted, alike)
    asked = Asked(num_blocks, block_tokens, layers, heads, dict(sizes or {}))
    if isinstance(notation, str) and PARTS in notation:
        tensors = page_of(notation, like, asked)
    else:
        content = content_of(parse(notation), like, asked)
        described = partial(
            KVLayout.from_tensors, notation, sizes=content.told, layers=content.layers,
            head_start=content.heads.start, part=content.part,
        )  # fmt: skip
        tensors = Tensors(content.shape, content.counts, content.dtype, content.words, described)
    return made(tensors, like, device, pin=pin, shared=shared)


def _wanted(like: KVLayout, block_tokens: int | None, heads: range | None, device: str) -> Wanted:
    tokens = None if block_tokens is None else counted("block_tokens", block_tokens)
    return Wanted(tokens, None if heads is None else heads_of(heads, like), device)
