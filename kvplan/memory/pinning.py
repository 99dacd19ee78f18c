"""Pin existing host memory of any size. Its pages are registered with the driver in pieces of bounded size."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

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


def pin_used(pool: KVLayout, used: KVLayout, owners: Sequence[Bytes], page: int, ordinal: int) -> KVLayout:
    """Pin the used part of a pool; return the pool with the ends of registrations as seams.

    Args:
        pool: a pool of tensors, each at the start of a page.
        used: the pool, or a slice of it.
        owners: the arrays that keep the pool's memory alive.
        page: bytes per page.
        ordinal: number of a GPU; the memory is pinned for all GPUs.

    Raises:
        TransferError: the driver cannot register a piece; then no piece stays registered.
    """
    most = MAX_REGISTERED // page * page
    pieces: list[Stretch] = []  # whole pages; no two share a page, because stretches are far apart
    for first, last in stretches(used.components):
        end = -(-last // page) * page
        pieces += [(at, min(at + most, end)) for at in range(first // page * page, end, most)]
    _register(owners, pieces, ordinal)
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


def _register(owners: Sequence[Bytes], pieces: Sequence[Stretch], ordinal: int) -> None:
    """Pin existing memory; each piece until the array that owns it, and every view of it, is gone."""
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


def _unregister(device: Any, registered: Sequence[int], registered_in: int) -> None:
    if registered_in != generation():  # a forked child has no registrations
        return
    with device.current(), Uncaptured(device):
        for address in registered:
            device.driver.cuMemHostUnregister(address)
