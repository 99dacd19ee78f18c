"""Bytes of another process's GPU memory, read and written by the CPU through the driver: slow, for checks."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvplan.cuda.device import Device
from kvplan.cuda.scopes import Uncaptured

Bytes = NDArray[np.uint8]


class MappedBytes:
    """A range of memory that is indexed like a numpy array of bytes: by a slice, or by an array of offsets.

    Args:
        device: the GPU in whose context the memory is mapped.
        address: address of the first byte.
        nbytes: number of bytes.
    """

    def __init__(self, device: Device, address: int, nbytes: int) -> None:
        self._device, self._address, self._nbytes = device, address, nbytes

    def __getitem__(self, index: Any) -> Bytes:
        """Return a copy of the bytes."""
        if isinstance(index, slice):
            first, last, _ = index.indices(self._nbytes)
            found = np.empty(last - first, np.uint8)
            self._copy([(found.ctypes.data, self._address + first, last - first)])
            return found
        order, runs = _runs(index)
        held = np.empty(order.size, np.uint8)
        base = held.ctypes.data
        self._copy([(base + at, self._address + offset, count) for at, offset, count in runs])
        out = np.empty_like(held)
        out[order] = held
        return out.reshape(np.shape(index))

    def __setitem__(self, index: Any, values: Any) -> None:
        """Write the bytes."""
        given = np.ascontiguousarray(values, np.uint8)
        if isinstance(index, slice):
            first, last, _ = index.indices(self._nbytes)
            self._copy([(self._address + first, given.ctypes.data, last - first)])
            return
        order, runs = _runs(index)
        held = given.ravel()[order]
        base = held.ctypes.data
        self._copy([(self._address + offset, base + at, count) for at, offset, count in runs])

    def _copy(self, moves: list[tuple[int, int, int]]) -> None:
        """Make copies, as (to, from, bytes), and wait for their end."""
        device = self._device
        with device.current(), Uncaptured(device):
            stream, event = device.stream(), device.event()
            try:
                for dst, src, nbytes in moves:
                    if nbytes:
                        device.copy(dst, src, nbytes, stream)
                device.record(event, stream)
                device.synchronize(event)
            finally:
                device.driver.cuEventDestroy_v2(event)
                device.driver.cuStreamDestroy_v2(stream)


def _runs(offsets: Any) -> tuple[NDArray[np.int64], list[tuple[int, int, int]]]:
    """Return the order of offsets, and runs of consecutive ones, as (place in that order, offset, count).

    >>> order, runs = _runs(np.array([7, 3, 4]))
    >>> order.tolist(), runs
    ([1, 2, 0], [(0, 3, 2), (2, 7, 1)])
    """
    flat = np.asarray(offsets, np.int64).ravel()
    order = np.argsort(flat, kind="stable")
    if not flat.size:
        return order, []
    ascending = flat[order]
    starts = np.concatenate([[0], np.flatnonzero(np.diff(ascending) != 1) + 1])
    counts = np.diff(np.append(starts, flat.size))
    return order, list(zip(starts.tolist(), ascending[starts].tolist(), counts.tolist(), strict=True))
