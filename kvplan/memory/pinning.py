"""Pinned host memory of any size. Its pages are registered with the driver in pieces of bounded size."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from math import gcd
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvplan.base.process import generation
from kvplan.cuda.device import Device, Uncaptured
from kvplan.cuda.driver import DEVICE_MAP, PORTABLE
from kvplan.errors import TransferError
from kvplan.layout.address_ranges import Rows, merged, registrations, stretches
from kvplan.layout.kvlayout import KVLayout
from kvplan.memory.shared_mappings import shareable

# Most bytes of one registration: half a TiB at once fails and leaves an error behind (driver 580).
MAX_REGISTERED = 32 << 30
PAGE = 4096  # two registrations may not share a page

Bytes = NDArray[np.uint8]


def edges(nbytes: int, row: int, most: int) -> list[int]:
    """Return the offsets where registrations begin and end: ends of rows if they are page boundaries, else of pages.

    Args:
        nbytes: bytes of the memory.
        row: bytes that should stay in one registration.
        most: largest registration in bytes.

    >>> edges(10 * 4096, 3 * 4096, 8 * 4096)
    [0, 24576, 40960]
    >>> edges(10 * 4096, 100, 2 * 4096)
    [0, 8192, 16384, 24576, 32768, 40960]
    """
    both = row * (PAGE // gcd(row, PAGE))
    step = most // both * both if both <= most else most // PAGE * PAGE
    return [*range(0, nbytes, max(step, PAGE)), nbytes]


def pinned(nbytes: int, row: int, ordinal: int) -> tuple[Bytes, tuple[int, ...]]:
    """Allocate pinned bytes; return them, and the addresses inside at which one registration ends and the next begins.

    The memory is freed when the array, and every view of it, is gone.

    Args:
        nbytes: number of bytes.
        row: bytes that should stay in one registration, such as the bytes of a block.
        ordinal: number of a GPU; the memory is pinned for all GPUs.
    """
    # A shared mapping: after a fork, the parent would get a copy of a private page, and the GPU would keep the old one.
    array = np.frombuffer(shareable(max(nbytes, 1)), np.uint8)
    bounds = [int(array.__array_interface__["data"][0]) + at for at in edges(nbytes, row, MAX_REGISTERED)]
    register(array, list(pairwise(bounds)), ordinal)
    return array, tuple(bounds[1:-1])


def register(array: Bytes, pieces: Sequence[tuple[int, int]], ordinal: int) -> None:
    """Pin existing memory until the array, and every view of it, is gone.

    Args:
        array: the array that keeps the memory alive.
        pieces: addresses of each registration's first byte, and of the first byte after it; no two share a page.
        ordinal: number of a GPU; the memory is pinned for all GPUs.

    Raises:
        TransferError: the driver cannot register a piece; then no piece stays registered.
    """
    device = Device(ordinal)
    registered: list[int] = []
    try:
        with device.current(), Uncaptured(device):
            for first, last in pieces:
                what = f"{last - first} bytes at {first:#x}"
                device.driver.call("cuMemHostRegister_v2", first, last - first, PORTABLE | DEVICE_MAP, what=what)
                registered.append(first)
    except TransferError:
        _unregister(device, registered, generation())
        raise
    weakref.finalize(array, _unregister, device, registered, generation()).atexit = False


def pin_used(
    pool: KVLayout, used: KVLayout, memory: Bytes, page: int, strides: Sequence[int], ordinal: int
) -> KVLayout:
    """Pin the used part of a pool; return the pool with the ends of registrations as seams.

    Args:
        pool: a pool of C-contiguous tensors, each at the start of a page.
        used: a slice of the pool.
        memory: the array that keeps the pool's memory alive.
        page: bytes per page.
        strides: strides of the tensors' dims in bytes, outermost first. Registrations end between rows.
        ordinal: number of a GPU; the memory is pinned for all GPUs.
    """
    tensors = [Rows(region.address, tuple(strides)) for region in pool.regions]
    pieces = registrations(stretches(used.components), tensors, page, MAX_REGISTERED)
    register(memory, pieces, ordinal)
    whole = merged(pieces)
    start, end = tensors[0].address, pool.regions[-1].end
    edges = sorted({edge for piece in pieces for edge in piece if start < edge < end})
    regions = tuple(
        replace(
            region,
            pinned=any(first <= region.address and region.end <= last for first, last in whole),
            seams=tuple(edge for edge in edges if region.address <= edge <= region.end),
        )
        for region in pool.regions
    )
    return KVLayout(pool.built._replace(regions=regions), tensors=pool.tensors)


def _unregister(device: Any, registered: list[int], made_in: int) -> None:
    if made_in != generation():  # a forked child has no registrations
        return
    with device.current(), Uncaptured(device):
        for address in registered:
            device.driver.cuMemHostUnregister(address)
