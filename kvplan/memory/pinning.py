"""Pin existing host memory of any size. Its pages are registered with the driver in pieces of bounded size."""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from math import lcm
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvplan.base.process import generation
from kvplan.cuda.device import Device, Uncaptured
from kvplan.cuda.driver import DEVICE_MAP, PORTABLE
from kvplan.errors import TransferError
from kvplan.layout.address_ranges import Stretch, merged, stretches
from kvplan.layout.kvlayout import KVLayout

# Most bytes of one registration: half a TiB at once fails and leaves an error behind (driver 580).
MAX_REGISTERED = 32 << 30

Bytes = NDArray[np.uint8]


class Rows(NamedTuple):
    """The rows of one C-contiguous tensor, between which registrations may be cut.

    Attributes:
        address: address of the first byte, on a page boundary.
        strides: strides of the dims in bytes, outermost first.
    """

    address: int
    strides: tuple[int, ...]


def registrations(found: Sequence[Stretch], tensors: Sequence[Rows], page: int, most: int) -> list[Stretch]:
    """Cut stretches into registrations of whole pages and at most ``most`` bytes. No two registrations share a page.

    A cut is at a page boundary between two tensors, or between two rows of the outermost dim for which this is
    possible. If it is possible for no dim, a cut is at any page boundary.

    Args:
        found: stretches inside the tensors, ascending, two pages or more apart, or at page boundaries.
        tensors: tensors in order of address; each begins at a page.
        page: bytes per page.
        most: most bytes per registration, at least a page.

    >>> registrations([(8192, 50_000)], [Rows(8192, (12_288, 100)), Rows(32_768, (12_288, 100))], 4096, 20_000)
    [(8192, 20480), (20480, 32768), (32768, 45056), (45056, 53248)]
    >>> registrations([(5000, 20_000)], [Rows(0, (4100,))], 4096, 8192)
    [(4096, 12288), (12288, 20480)]
    """
    starts = [tensor.address for tensor in tensors]
    cut: list[Stretch] = []
    for first, last in found:
        at, end = first // page * page, -(-last // page) * page
        while end - at > most:
            tensor = tensors[bisect_right(starts, at + most) - 1]
            upto = _row_end(tensor, at, at + most, page)
            cut.append((at, upto))
            at = upto
        cut.append((at, end))
    return cut


def _row_end(tensor: Rows, after: int, most: int, page: int) -> int:
    """Return the last address after ``after`` and up to ``most`` at which a row and a page end, or only a page."""
    for stride in tensor.strides:
        step = lcm(stride, page)
        place = tensor.address + (most - tensor.address) // step * step
        if place > after:
            return place
    return most // page * page


def register(owners: Sequence[Bytes], pieces: Sequence[Stretch], ordinal: int) -> None:
    """Pin existing memory; each piece until the array that owns it, and every view of it, is gone.

    Args:
        owners: the arrays that keep the memory alive.
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
    for owner in owners:
        start = int(owner.__array_interface__["data"][0])
        mine = [first for first in registered if start <= first < start + owner.nbytes]
        weakref.finalize(owner, _unregister, device, mine, generation()).atexit = False


def pin_used(
    pool: KVLayout, used: KVLayout, owners: Sequence[Bytes], page: int, strides: tuple[int, ...], ordinal: int
) -> KVLayout:
    """Pin the used part of a pool; return the pool with the ends of registrations as seams.

    Args:
        pool: a pool of C-contiguous tensors, each at the start of a page.
        used: the pool, or a slice of it.
        owners: the arrays that keep the pool's memory alive.
        page: bytes per page.
        strides: strides of the tensors' dims in bytes, outermost first. Registrations end between rows.
        ordinal: number of a GPU; the memory is pinned for all GPUs.
    """
    tensors = [Rows(region.address, strides) for region in pool.regions]
    pieces = registrations(stretches(used.components), tensors, page, MAX_REGISTERED)
    register(owners, pieces, ordinal)
    whole = merged(pieces)
    alone = {region.address for region in pool.regions} ^ {region.end for region in pool.regions}
    edges = sorted({edge for piece in pieces for edge in piece} - alone)
    regions = tuple(
        replace(
            region,
            pinned=any(first <= region.address and region.end <= last for first, last in whole),
            seams=tuple(edge for edge in edges if region.address <= edge <= region.end),
        )
        for region in pool.regions
    )
    return KVLayout(pool.built._replace(regions=regions), tensors=pool.tensors)


def _unregister(device: Any, registered: Sequence[int], made_in: int) -> None:
    if made_in != generation():  # a forked child has no registrations
        return
    with device.current(), Uncaptured(device):
        for address in registered:
            device.driver.cuMemHostUnregister(address)
