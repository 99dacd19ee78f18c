"""Make the memory of a pool: numpy arrays or torch tensors, pinned, or shared with other processes."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from math import prod
from os import PathLike
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kvplan.errors import HostMemoryError, LayoutError
from kvplan.layout.components import Pool
from kvplan.layout.dtypes import ITEMSIZE
from kvplan.layout.kvlayout import KVLayout
from kvplan.memory.torch_devices import check_device

if TYPE_CHECKING:
    from pathlib import Path

    from kvplan.memory.shared import Shared


class Tensors(NamedTuple):
    """The tensors of a pool, before they have memory.

    Attributes:
        shape: extents of each tensor, in elements.
        counts: lengths of the nested lists of tensors, outermost first; empty if there is one tensor.
        dtype: name of the element type in torch and numpy.
        geometry: the pool in words, which all processes that share it must agree on.
        described: makes the layout of the tensors, nested in lists, with ``seams``.
    """

    shape: tuple[int, ...]
    counts: tuple[int, ...]
    dtype: str
    geometry: str
    described: Callable[..., KVLayout]


def made(
    tensors: Tensors, like: KVLayout, device: str, *, pin: bool, shared: str | PathLike[str] | bool | None
) -> KVLayout:
    """Allocate the tensors of a pool and return its layout; see :func:`kvplan.allocate` for the arguments."""
    shape, counts, dtype, geometry, described = tensors
    itemsize = ITEMSIZE[dtype]
    ordinal = (int(like.device.partition(":")[2] or 0) if like.device.startswith("cuda") else 0) if pin else None
    if shared and device != "cpu":
        raise LayoutError(f"device is {device!r}; a shared pool is CPU memory, so give 'cpu'")
    if shared is not None and not isinstance(shared, bool):
        from kvplan.memory.shared import share
        from kvplan.memory.shared_path import path_of

        memory = share(shared, geometry, [prod(shape) * itemsize] * prod(counts))
        torch = wants_torch(like, device)
        held = _nest([_view(each, dtype, shape, torch=torch) for each in memory.tensors], counts)
        pool = _named(described(held), path_of(shared), geometry, memory)
        strides = [prod(shape[k + 1 :]) * itemsize for k in range(len(shape))]
        return _pin_used(pool, like, memory, strides, ordinal) if torch and ordinal is not None else pool
    if not wants_torch(like, device):
        empty = partial(_shareable, dtype=dtype, torch=False) if shared else partial(np.empty, dtype=_element(dtype))
        return described(_nest([empty(shape) for _ in range(prod(counts))], counts))
    if device != "cpu":
        check_device(device)
    memory_of, seams = _tensors(shape, prod(counts), dtype, device, ordinal, shared=bool(shared))
    return described(_nest(memory_of, counts), seams=seams)


def wants_torch(like: KVLayout, device: str) -> bool:
    """Return whether torch allocates a pool for ``like``."""
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


def viewed(memory: Any, dtype: str, shape: Sequence[int]) -> Any:
    """Return a view of bytes, whose last dim is contiguous, as an array or tensor of a type and shape."""
    if isinstance(memory, np.ndarray):
        return memory.view(_element(dtype)).reshape(shape)
    import torch

    return memory.view(getattr(torch, dtype, torch.uint8)).view(tuple(shape))


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
                      stacklevel=4)  # fmt: skip
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
                warnings.warn(f"could not pin {nbytes} bytes, so the pool is pageable: {error}", stacklevel=4)
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
