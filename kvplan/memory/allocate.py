"""Allocate a pool for the content of another layout; the pool's notation may have another order of dims."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from math import prod
from os import PathLike
from typing import TYPE_CHECKING, Any

import numpy as np

from kvplan.advise.host_order import Wanted
from kvplan.base.integers import integer, integers
from kvplan.base.numbers import number_ranges
from kvplan.base.quoting import quoted
from kvplan.errors import HostMemoryError, LayoutError
from kvplan.layout.components import Pool
from kvplan.layout.dtypes import ITEMSIZE
from kvplan.layout.kvlayout import KVLayout
from kvplan.layout.notation import Notation, parse
from kvplan.layout.spec import extents_of, shape_of
from kvplan.layout.strides import extent
from kvplan.memory.best_order import AUTO, allocated
from kvplan.memory.torch_devices import check_device

if TYPE_CHECKING:
    from pathlib import Path

    from kvplan.memory.shared import Shared

# Short names of dtypes in specs, with their names in torch and numpy.
_DTYPES = {
    "bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32", "fp64": "float64",
    "double": "float64", "byte": "uint8", "e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2",
}  # fmt: skip


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
            whose loads and stores are predicted to take the least time together, as ``kvplan advise`` prints it. Axes
            may be split, and parts of different shapes get an allocation each.
        like: the layout whose content the pool will hold. All its parts must have one size. If sizes differ (scales
            next to K and V), allocate a pool for each from ``like.slice(parts=...)`` and merge.
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
        The pool's layout. Its ``tensors`` are the allocated tensors, in nested lists if the notation has several.

    Raises:
        NotationError: the notation does not parse.
        LayoutError: the notation cannot hold ``like``, a size is invalid, torch has no such device, or the shared pool
            is in use with another geometry; then the message shows both.
        HostMemoryError: there is no space for a shared pool, or the file cannot be used as a pool.

    >>> import numpy as np
    >>> gpu = KVLayout.from_tensors("kv block token head dim", np.zeros((2, 8, 16, 2, 64), np.int8))
    >>> allocate("block layer kv token head dim", like=gpu, num_blocks=2, block_tokens=64)
    KVLayout('block layer kv token head dim | layer=1 kv=2 block=2 token=64 head=2 dim=64 | int8 on cpu')
    """
    if not isinstance(like, KVLayout):
        raise LayoutError(f"like is a {type(like).__name__}; give the KVLayout whose content the pool will hold")
    if notation == AUTO:
        if sizes:
            raise LayoutError(f"sizes are {quoted(dict(sizes))}; 'auto' chooses the extents of split axes itself")
        wanted = _wanted(like, block_tokens, heads, device)
        alike = partial(
            allocate, num_blocks=num_blocks, block_tokens=None if like.opaque else block_tokens,
            layers=tuple(layers) if isinstance(layers, Iterable) else layers,
            heads=wanted.heads, device=device, pin=pin, shared=shared,
        )  # fmt: skip
        return allocated(like, wanted, alike, named=isinstance(shared, str | PathLike))
    parsed = parse(notation)
    if "subblock" in parsed.axes and not like.opaque:
        raise LayoutError(
            f"'{parsed}' has opaque sub-blocks, and like has token slots: write token instead of subblock"
        )
    part, content = _parts(parsed, like)
    dtype, itemsize = _dtype(like, content)
    held, span = _layers(layers, like), _heads(heads, like)
    given = dict(sizes or {})
    axes = {
        "layer": len(held),
        "block": like.num_blocks if num_blocks is None else _counted("num_blocks", num_blocks),
        "token": (1 if like.opaque else like.block_tokens) if block_tokens is None
        else _counted("block_tokens", block_tokens),
        "head": len(span),
        "dim": content // itemsize,
    }  # fmt: skip
    if like.opaque:
        axes["subblock"] = given.get("subblock", like.block_tokens)
    for axis, size in axes.items():
        if size != 1 and axis not in parsed.axes:
            hint = ": give sizes={'subblock': ...}, the number of opaque blocks in one block of the pool"
            raise LayoutError(f"'{parsed}' has no {axis!r} axis, and must hold {size} of them"
                              f"{hint if axis == 'token' and like.opaque else ''}")  # fmt: skip
    extents = extents_of(parsed, {k: v for k, v in axes.items() if k in parsed.axes} | given)
    for axis, size in axes.items():
        atoms = [str(atom) for atom in parsed.factors(axis)]
        if atoms and prod(extents[name] for name in atoms) != size:
            raise LayoutError(f"sizes make {axis} {prod(extents[name] for name in atoms)}; the pool needs {size}")
    shape = shape_of(parsed, extents)
    counts = [extents[axis] for axis in parsed.nesting]
    told = {k: v for k, v in extents.items() if k != "kv" and k not in parsed.nesting}
    described = partial(KVLayout.from_tensors, notation, sizes=told, layers=held, head_start=span.start, part=part)
    ordinal = (int(like.device.partition(":")[2] or 0) if like.device.startswith("cuda") else 0) if pin else None
    if shared and device != "cpu":
        raise LayoutError(f"device is {device!r}; a shared pool is CPU memory, so give 'cpu'")
    if shared is not None and not isinstance(shared, bool):
        from kvplan.memory.shared import share
        from kvplan.memory.shared_path import path_of

        sized = " ".join(f"{name}={size}" for name, size in sorted(extents.items()))
        numbered = f"layers {number_ranges(held)} | heads {number_ranges(span)} | part {part}"
        nbytes = [prod(shape) * itemsize] * prod(counts)
        geometry = f"{parsed} | {sized} | {dtype} | {numbered}"
        memory = share(shared, geometry, nbytes)
        torch = _wants_torch(like, device)
        tensors = _nest([_view(each, dtype, shape, torch=torch) for each in memory.tensors], counts)
        pool = _named(described(tensors), path_of(shared), geometry, memory)
        strides = [prod(shape[k + 1 :]) * itemsize for k in range(len(shape))]
        return _pin_used(pool, like, memory, strides, ordinal) if torch and ordinal is not None else pool
    if not _wants_torch(like, device):
        empty = partial(_shareable, dtype=dtype, torch=False) if shared else partial(np.empty, dtype=_element(dtype))
        return described(_nest([empty(shape) for _ in range(prod(counts))], counts))
    if device != "cpu":
        check_device(device)
    tensors, seams = _tensors(shape, prod(counts), dtype, device, ordinal, shared=bool(shared))
    return described(_nest(tensors, counts), seams=seams)


def _wanted(like: KVLayout, block_tokens: int | None, heads: range | None, device: str) -> Wanted:
    tokens = None if block_tokens is None else _counted("block_tokens", block_tokens)
    return Wanted(tokens, None if heads is None else _heads(heads, like), device)


def _layers(layers: Iterable[int] | None, like: KVLayout) -> tuple[int, ...]:
    """Return the global numbers of the pool's layers, ascending."""
    if layers is None:
        return like.layers
    right = "give the global numbers of the pool's layers, each once"
    given = integers("layers", layers, least=0, right=right) if isinstance(layers, Iterable) else ()
    if not given or len(set(given)) != len(given):
        raise LayoutError(f"layers is {quoted(layers)}; {right}")
    if missing := sorted(set(like.layers) - set(given)):
        raise LayoutError(
            f"like holds layers {number_ranges(missing)}, and the pool's layers are {number_ranges(sorted(given))}; "
            "slice like first"
        )
    return tuple(sorted(given))


def _counted(name: str, value: Any) -> int:
    return integer(name, value, least=1, right="a pool has at least one")


def _heads(heads: range | None, like: KVLayout) -> range:
    """Return the global numbers of the pool's heads."""
    if heads is None:
        return like.heads
    if not isinstance(heads, range) or heads.step != 1 or not len(heads) or heads.start < 0:
        raise LayoutError(f"heads is {heads!r}; give a range of step 1 with at least one head, from 0 on")
    if len(heads) > 1 and not any(component.form.headed for component in like.components):
        raise LayoutError(f"heads is {heads!r}, and like has no head axis: its content belongs to no head")
    if like.heads.start < heads.start or like.heads.stop > heads.stop:
        raise LayoutError(
            f"like holds heads {number_ranges(like.heads)}, and the pool's heads are {number_ranges(heads)}; "
            "slice like first"
        )
    return heads


def _parts(notation: Notation, like: KVLayout) -> tuple[str, int]:
    """Return the name of the content, and its bytes per (token, head)."""
    sizes = {extent(c.form.dim) for c in like.components}
    heads = {extent(c.form.head) for c in like.components}
    if len(sizes) > 1 or len(heads) > 1:
        raise LayoutError(
            f"parts {like.parts} hold {sorted(sizes)} bytes per (token, head) and {sorted(heads)} heads, and one "
            "notation holds parts of one size; allocate each from like.slice(parts=...) and merge"
        )
    if len({(c.layer, c.part) for c in like.components}) != len(like.layers) * len(like.parts):
        raise LayoutError(f"not every layer of {like} holds every part; allocate each part from its own slice")
    if "kv" not in notation.axes:
        if len(like.parts) != 1:
            raise LayoutError(
                f"'{notation}' has no kv axis, and must hold parts {like.parts}; write kv, as in (kv dim)"
            )
        return like.parts[0], sizes.pop()
    pair = like.parts
    for name in ("kv", *(part.removeprefix("k_") for part in pair)):
        if pair == (("k", "v") if name == "kv" else (f"k_{name}", f"v_{name}")):
            return name, sizes.pop()
    raise LayoutError(f"'{notation}' has a kv axis for parts ('k', 'v'), and like holds {pair}; leave out kv")


def _dtype(like: KVLayout, content: int) -> tuple[str, int]:
    """Return name and bytes of the pool's element type: the type of ``like`` if it divides the content, else uint8."""
    itemsize = ITEMSIZE.get(like.dtype)
    name = _DTYPES.get(like.dtype, like.dtype)
    return (name, itemsize) if itemsize and content % itemsize == 0 else ("uint8", 1)


def _wants_torch(like: KVLayout, device: str) -> bool:
    owners = [type(region.owner).__module__.partition(".")[0] for region in like.regions]
    return device != "cpu" or "torch" in owners


def _element(dtype: str) -> np.dtype[Any]:
    """Return the numpy type of a name; an unsigned integer of equal width if numpy lacks it (bfloat16, fp8)."""
    try:
        return np.dtype(dtype)
    except TypeError:
        return np.dtype(f"u{ITEMSIZE[dtype]}")


def _view(memory: Any, dtype: str, shape: Sequence[int], *, torch: bool) -> Any:
    """Return a view of bytes as an array or tensor of a type and shape."""
    if not torch:
        return memory.view(_element(dtype)).reshape(shape)
    import torch as library

    return library.from_numpy(memory).view(getattr(library, dtype, library.uint8)).view(tuple(shape))


def _named(pool: KVLayout, path: Path, geometry: str, memory: Shared) -> KVLayout:
    """Return a shared pool's layout whose regions name the pool, for processes that load the layout from a pickle."""
    if not memory.token:  # another version of kvplan made the file
        return pool
    each = memory.tensors[0].nbytes
    address = int(memory.memory.ctypes.data)
    held = Pool(str(path), geometry, len(memory.tensors), each, memory.token, address, attach_pool)
    regions = tuple(replace(region, pool=held) for region in pool.regions)
    return KVLayout(pool.built._replace(regions=regions), tensors=pool.tensors)


def attach_pool(pool: Pool) -> tuple[int, Any] | None:
    """Map a pool that a pickle names; return its address here and its memory, or None if no process uses the pool."""
    from kvplan.memory.shared import attach

    found = attach(pool.path, pool.geometry, [pool.nbytes] * pool.tensors, pool.token)
    return None if found is None else (int(found.memory.ctypes.data), found.memory)


def _pin_used(pool: KVLayout, like: KVLayout, memory: Shared, strides: Sequence[int], ordinal: int) -> KVLayout:
    """Pin the memory of the pool that ``like`` uses, with the ends of registrations as seams; warn if that fails."""
    import torch

    if not torch.cuda.is_available():
        return pool
    from kvplan.memory.pinning import pin_used

    used = pool.slice(layers=like.layers)
    if any(component.form.headed for component in used.components):
        with contextlib.suppress(LayoutError):  # if heads cross a boundary of a split axis, pin all heads
            used = used.slice(heads=like.heads)
    try:
        return pin_used(pool, used, memory.memory, memory.page, strides, ordinal)
    except RuntimeError as error:
        warnings.warn(f"could not pin this process's part of {pool.nbytes} bytes, so the pool is pageable: {error}",
                      stacklevel=3)  # fmt: skip
        return pool


def _shareable(shape: Sequence[int], dtype: str, *, torch: bool) -> Any:
    """Return an array or tensor of zeros that other processes can map."""
    from kvplan.memory.shared_mappings import sealed_memory

    nbytes = prod(shape) * ITEMSIZE[dtype]
    try:
        return _view(np.frombuffer(sealed_memory(max(nbytes, 1)), np.uint8)[:nbytes], dtype, shape, torch=torch)
    except (OSError, ValueError) as error:
        raise HostMemoryError(f"cannot make shared memory of {nbytes:,} bytes: {error}") from error


def _tensors(
    shape: Sequence[int], count: int, dtype: str, device: str, pin: int | None, *, shared: bool
) -> tuple[list[Any], list[int]]:
    """Allocate torch tensors; return them and the seams, where registrations end. ``pin`` is the number of a GPU."""
    import torch

    element = getattr(torch, dtype, torch.uint8)
    ordinal = pin if device == "cpu" and torch.cuda.is_available() else None
    nbytes = prod(shape) * element.itemsize
    tensors: list[Any] = []
    seams: list[int] = []
    for _ in range(count):
        if ordinal is not None:
            from kvplan.memory.pinning import pinned

            try:
                memory, ends = pinned(nbytes, nbytes // shape[0], ordinal)
                seams += ends
                tensors.append(_view(memory, dtype, shape, torch=True))
                continue
            except RuntimeError as error:
                ordinal = None
                warnings.warn(f"could not pin {nbytes} bytes, so the pool is pageable: {error}", stacklevel=3)
        tensors.append(
            _shareable(shape, dtype, torch=True) if shared else torch.empty(tuple(shape), dtype=element, device=device)
        )
    return tensors, seams


def _nest(flat: Sequence[Any], counts: Sequence[int]) -> Any:
    """Nest a list by the given lengths, outermost first; if there are no lengths, return its only tensor."""
    level = list(flat)
    for count in reversed(counts):
        edges = range(0, len(level) + 1, count)
        level = [level[a:b] for a, b in pairwise(edges)]
    return level[0]
