"""Make the memory of a pool: numpy arrays or torch tensors, pinned, or shared with other processes."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from math import prod
from os import PathLike
from typing import TYPE_CHECKING, Any

import numpy as np

from kvplan.base.values import quoted
from kvplan.errors import HostMemoryError, LayoutError
from kvplan.layout.components import Pool
from kvplan.layout.kvlayout import KVLayout
from kvplan.memory.pages import Pages

if TYPE_CHECKING:
    from kvplan.memory.shared import Shared

log = logging.getLogger("kvplan")


def allocated(
    pages: Pages, like: KVLayout, *, device: str, pin: bool | None, shared: str | PathLike[str] | bool | None
) -> KVLayout:
    """Allocate the pages of a pool and return its layout; see :func:`kvplan.allocate` for the arguments."""
    torch = device != "cpu" or "torch" in [type(r.owner).__module__.partition(".")[0] for r in like.regions]
    nbytes, count = prod(pages.outer) * pages.nbytes, prod(pages.counts)
    if shared and device != "cpu":
        raise LayoutError(f"device is {device!r}; a shared pool is CPU memory, so give 'cpu'")
    if device != "cpu":
        _check_device(device)
        return pages.layout(_nest([_on_device(nbytes, device) for _ in range(count)], pages.counts))
    pinned = pin is not False and torch and _has_gpu()
    if pin and not pinned:
        why = "torch reaches no GPU" if torch else "numpy allocates, because 'like' holds no tensor of torch"
        log.warning("pin=True has no effect: %s; the pool is pageable", why)
    named = shared is not None and not isinstance(shared, bool)
    if named:
        from kvplan.memory.shared import share

        memory = share(shared, str(pages), [nbytes] * count)
        arrays, owners, page = memory.tensors, [memory.memory], memory.page
    else:
        arrays = [_bytes(nbytes, shared=bool(shared), pinned=pinned) for _ in range(count)]
        owners, page = arrays, 4096
    pool = pages.layout(_nest([_tensor(array) if torch else array for array in arrays], pages.counts))
    if named:
        pool = _named(pool, str(pages), memory)
    if not pinned:
        return pool
    from kvplan.memory.pinning import pin_used

    ordinal = int(like.device.partition(":")[2] or 0) if like.device.startswith("cuda") else 0
    used = pool.slice(layers=like.layers) if named else pool
    if named and any(component.form.headed for component in used.components):
        with contextlib.suppress(LayoutError):  # heads cross a boundary of a split axis: pin all heads
            used = used.slice(heads=like.heads)
    try:
        return pin_used(pool, used, owners, page, pages.strides, ordinal)
    except RuntimeError as error:
        part = "this process's part of " if named else ""
        warnings.warn(f"could not pin {part}{pool.nbytes} bytes, so the pool is pageable: {error}", stacklevel=3)
        return pool


def _has_gpu() -> bool:
    import torch

    return bool(torch.cuda.is_available())


def _bytes(nbytes: int, *, shared: bool, pinned: bool) -> Any:
    """Return an array of bytes: of zeros that other processes can map if it is shared or pinned."""
    from kvplan.memory.shared_mappings import sealed_memory, shareable

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
    except RuntimeError as error:
        why = str(error).partition("\n")[0]
        raise LayoutError(f"{device} has no {nbytes:,} bytes for a pool ({why}); take fewer blocks") from error


def _tensor(array: Any) -> Any:
    import torch

    return torch.from_numpy(array)


def _nest(flat: Sequence[Any], counts: Sequence[int]) -> Any:
    """Nest a list by the given lengths, outermost first; if there are no lengths, return its only tensor."""
    level = list(flat)
    for count in reversed(counts):
        edges = range(0, len(level) + 1, count)
        level = [level[a:b] for a, b in pairwise(edges)]
    return level[0]


def _named(pool: KVLayout, geometry: str, memory: Shared) -> KVLayout:
    """Return a shared pool's layout whose regions name the pool, for processes that load the layout from a pickle."""
    if not memory.token:  # another version of kvplan made the file
        return pool
    address = int(memory.memory.ctypes.data)
    nbytes = memory.tensors[0].nbytes
    name = Pool(memory.path, geometry, len(memory.tensors), nbytes, memory.token, address, attach_pool)
    regions = tuple(replace(region, pool=name) for region in pool.regions)
    return KVLayout(pool.built._replace(regions=regions), tensors=pool.tensors)


def attach_pool(pool: Pool) -> tuple[int, Any] | None:
    """Map a pool that a pickle names; return its address here and its memory, or None if no process uses the pool."""
    from kvplan.memory.shared import attach

    found = attach(pool.path, pool.geometry, [pool.nbytes] * pool.tensors, pool.token)
    return None if found is None else (int(found.memory.ctypes.data), found.memory)


def _check_device(device: Any) -> None:
    """Check that torch can allocate on a device.

    Raises:
        LayoutError: torch does not know the device, or this machine lacks it.
    """
    import torch

    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        raise LayoutError(f"device is {quoted(device)}, which torch does not know; give 'cpu' or 'cuda:0'") from None
    if found.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if not count:
            raise LayoutError(
                f"device is {quoted(str(device))}, and torch {torch.__version__} reaches no GPU; give 'cpu'"
            )
        if found.index is not None and found.index >= count:
            raise LayoutError(f"device is {quoted(str(device))}, and the GPUs here are cuda:0 to cuda:{count - 1}")
        return
    try:
        torch.empty(0, device=found)
    except (AssertionError, RuntimeError, NotImplementedError) as error:  # torch was built without it
        why = str(error).partition("\n")[0]
        raise LayoutError(f"device is {quoted(str(device))}, which torch cannot use here ({why}); give 'cpu'") from None
