"""Pinned host memory of any size: pages of the system, registered with the driver in bounded pieces."""

from __future__ import annotations

import mmap
import weakref
from itertools import pairwise
from math import gcd
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvplan.errors import TransferError
from kvplan.execute.cuda import DEVICE_MAP, PORTABLE, Device, Uncaptured
from kvplan.execute.forks import generation

# Bytes of one registration at most: half a TiB at once fails and leaves an error behind (driver 580).
MAX_REGISTERED = 32 << 30
PAGE = 4096  # two registrations may not share a page

Bytes = NDArray[np.uint8]


def edges(nbytes: int, row: int, most: int) -> list[int]:
    """Where registrations begin and end: at row boundaries where these are page boundaries, else at page boundaries.

    Args:
        nbytes: of all.
        row: bytes that should stay in one registration.
        most: bytes of a registration.

    >>> edges(10 * 4096, 3 * 4096, 8 * 4096)
    [0, 24576, 40960]
    >>> edges(10 * 4096, 100, 2 * 4096)
    [0, 8192, 16384, 24576, 32768, 40960]
    """
    both = row * (PAGE // gcd(row, PAGE))
    step = most // both * both if both <= most else most // PAGE * PAGE
    return [*range(0, nbytes, max(step, PAGE)), nbytes]


def pinned(nbytes: int, row: int, ordinal: int) -> tuple[Bytes, tuple[int, ...]]:
    """Pinned bytes, and the addresses inside where one registration ends and the next begins.

    The memory is given back when the array, and all that is made of it, is gone.

    Args:
        nbytes: of it.
        row: bytes that should stay in one registration, such as those of a block.
        ordinal: a GPU; the memory is pinned for all of them.

    Raises:
        TransferError: the driver refuses; nothing stays registered.
    """
    device = Device(ordinal)
    # Shared, because of a private page the parent would get another copy after a fork, and the GPU keep the old one.
    array = np.frombuffer(mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS), np.uint8)
    address = int(array.__array_interface__["data"][0])
    bounds = [address + at for at in edges(nbytes, row, MAX_REGISTERED)]
    registered: list[int] = []
    try:
        with device.current(), Uncaptured(device):
            for first, last in pairwise(bounds):
                code = device.driver.cuMemHostRegister_v2(first, last - first, PORTABLE | DEVICE_MAP)
                device.driver.check("cuMemHostRegister", code, f"{last - first} bytes at {first:#x}")
                registered.append(first)
    except TransferError:
        _unregister(device, registered, generation())
        raise
    weakref.finalize(array, _unregister, device, registered, generation()).atexit = False
    return array, tuple(bounds[1:-1])


def _unregister(device: Any, registered: list[int], made_in: int) -> None:
    if made_in != generation():  # a fork's child has nothing registered
        return
    with device.current(), Uncaptured(device):
        for address in registered:
            device.driver.cuMemHostUnregister(address)
