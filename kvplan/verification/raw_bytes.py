"""Bytes of live layouts, read and written one by one by address: slow, and independent of every transfer path."""

from __future__ import annotations

import ctypes
import sys
from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvplan.cuda.ipc import MappedBytes, Opening
from kvplan.errors import LayoutError
from kvplan.layout.components import NOT_HERE, Component, Region
from kvplan.layout.strides import Factors, Int64Array, offsets_of

if TYPE_CHECKING:
    from kvplan.layout.kvlayout import KVLayout

Bytes = NDArray[np.uint8]
PIECE = 16 << 10  # addresses in CPU memory that are split at once: few enough for caches, and mostly in one region
BY_CPU = (np.ndarray, MappedBytes)  # memory that the CPU indexes; other memory is a tensor


def _offsets_at(factors: Factors, coordinates: Int64Array) -> Int64Array:
    """Return the byte offsets of coordinates of an axis, without a table of the whole axis."""
    out = np.zeros(len(coordinates), dtype=np.int64)
    for count, stride in reversed(factors):
        coordinates, digit = np.divmod(coordinates, count)
        out += digit * stride
    return out


def addresses_of(
    component: Component, blocks: Int64Array, tokens: Int64Array, heads: Int64Array, content: Int64Array
) -> Int64Array:
    """Return every byte's address: (tokens, heads, bytes); each token by block id and slot; heads and bytes from 0."""
    form = component.form
    table = form.table
    starts = _offsets_at(form.block, blocks) if table is None else np.array(table, dtype=np.int64)[blocks]
    rows = component.address + starts + offsets_of(form.token)[tokens]
    return rows[:, None, None] + offsets_of(form.head)[heads][None, :, None] + offsets_of(form.dim)[content]


class Contents:
    """The memory of a layout, whose bytes are read and written by address.

    Raises:
        LayoutError: the addresses are not this process's, or the owner of GPU memory is not a torch tensor.
    """

    def __init__(self, layout: KVLayout) -> None:
        if layout.addresses != "memory":
            raise LayoutError(f"the addresses of {layout!r} are {NOT_HERE[layout.addresses]}; they cannot be read")
        # A region may lie in another region (views of views). Of regions with one address, the widest comes first.
        self._regions = sorted(layout.regions, key=lambda region: (region.address, -region.nbytes))
        self._starts = [region.address for region in self._regions]
        # For each region: of all regions that begin no later, the region with the highest end.
        self._widest = list(accumulate(range(len(self._regions)), self._further))
        self._memory = [_host(region) if region.device == "cpu" else _torch(region) for region in self._regions]
        on_cpu = all(isinstance(memory, np.ndarray) for memory in self._memory)
        self._piece = PIECE if on_cpu else sys.maxsize  # a GPU takes a call for each piece

    def _further(self, one: int, other: int) -> int:
        return other if self._regions[other].end > self._regions[one].end else one

    def read(self, addresses: Int64Array) -> Bytes:
        """Return the bytes at an array of addresses, in its shape."""
        out = np.empty(addresses.size, dtype=np.uint8)
        for which, memory, offsets in self._split(addresses.ravel()):
            held = memory[offsets]
            out[which] = held if isinstance(held, np.ndarray) else held.cpu().numpy()
        return out.reshape(addresses.shape)

    def write(self, addresses: Int64Array, values: Bytes) -> None:
        """Set the bytes at an array of addresses."""
        flat = values.ravel()
        for which, memory, offsets in self._split(addresses.ravel()):
            written = flat[which]
            memory[offsets] = written if isinstance(memory, BY_CPU) else offsets.new_tensor(written, dtype=memory.dtype)

    def _split(self, addresses: Int64Array) -> Iterator[tuple[Any, Any, Any]]:
        """Yield (numbers of the addresses, memory, offsets into it) for each region that holds some of a piece."""
        for first in range(0, len(addresses), self._piece):
            some = addresses[first : first + self._piece]
            low, high = int(some.min()), int(some.max())
            at = self._widest[max(bisect_right(self._starts, low) - 1, 0)]
            region = self._regions[at]
            if region.address <= low and high < region.end:  # the usual case: one region holds all
                yield slice(first, first + len(some)), *self._offsets(at, some)
                continue
            begun = np.searchsorted(self._starts, some, "right") - 1
            holding = np.array(self._widest)[np.maximum(begun, 0)]
            order = np.argsort(holding, kind="stable")
            for which in np.split(order, np.flatnonzero(np.diff(holding[order])) + 1):
                yield first + which, *self._offsets(int(holding[which[0]]), some[which])

    def _offsets(self, at: int, addresses: Int64Array) -> tuple[Any, Any]:
        """Return the memory of a region, and the offsets of addresses into it."""
        memory, offsets = self._memory[at], addresses - self._regions[at].address
        return memory, offsets if isinstance(memory, BY_CPU) else _indices(offsets, memory)


def _host(region: Region) -> Bytes:
    memory = (ctypes.c_uint8 * region.nbytes).from_address(region.address)
    return np.frombuffer(memory, dtype=np.uint8)


def _torch(region: Region) -> Any:
    """Return all bytes of a tensor's storage, as a tensor; or those of another process's memory."""
    if isinstance(region.owner, Opening):
        return region.owner.bytes_at(region.address, region.nbytes)
    storage = getattr(region.owner, "untyped_storage", None)
    if storage is None:
        raise LayoutError(
            f"memory on {region.device} at {region.address:#x} belongs to no torch tensor, so it cannot be read"
        )
    import torch

    return torch.empty(0, dtype=torch.uint8, device=region.owner.device).set_(storage())


def _indices(offsets: Int64Array, memory: Any) -> Any:
    import torch

    return torch.from_numpy(offsets).to(memory.device)
