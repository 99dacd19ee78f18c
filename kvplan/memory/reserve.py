"""Reserve addresses for the layout of another process. Only touched pages take memory."""

from __future__ import annotations

import ctypes
import mmap
from dataclasses import replace
from typing import Any

from kvplan.errors import LayoutError
from kvplan.layout.kvlayout import KVLayout
from kvplan.layout.records import relocated

_PAGE = 4096
_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Linux: untouched pages take no memory


def reserve(layout: KVLayout) -> KVLayout:
    """Return a copy of a layout in CPU memory of this process, with the same strides and offsets within pages.

    Hundreds of gigabytes can be reserved, because untouched pages take no memory. All bytes are zero at first.

    Raises:
        LayoutError: the system cannot reserve the addresses.

    >>> from kvplan import KVLayout
    >>> spec = {"notation": "kv block token dim", "sizes": {"block": 1 << 20, "token": 16, "dim": 1024}}
    >>> pool = reserve(KVLayout.from_spec(spec))
    >>> pool.virtual, pool.nbytes >> 30
    (False, 64)
    """
    regions = layout.regions  # ascending
    places: list[int] = []  # offset of each region from the first reserved byte
    reach, end = 0, 0
    for region in regions:
        if places and region.address <= reach:  # regions that touch or nest stay together
            place = places[-1] + region.address - regions[len(places) - 1].address
        else:
            place = -(-end // _PAGE) * _PAGE + _PAGE * bool(places) + region.address % _PAGE
        places.append(place)
        reach, end = max(reach, region.end), max(end, place + region.nbytes)
    base, owner = _mapped(end)
    fresh: dict[str, Any] = {
        "device": "cpu",
        "pinned": False,
        "writable": True,
        "virtual": False,
        "recorded": False,
        "pool": None,
    }
    moved = [
        replace(region, address=base + place, owner=owner, held=None, **fresh)
        for region, place in zip(layout.regions, places, strict=True)
    ]
    return KVLayout(relocated(layout.built, moved))


def _mapped(nbytes: int) -> tuple[int, Any]:
    """Map bytes, all zero; return their address and their owner."""
    try:
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
    except (OSError, ValueError, OverflowError) as error:
        raise LayoutError(f"cannot reserve {nbytes:,} bytes of addresses ({error}); describe fewer blocks") from error
    if hasattr(mmap, "MADV_NOHUGEPAGE"):  # a touched byte should take a page of 4 KiB, not of 2 MiB
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    owner = (ctypes.c_char * 1).from_buffer(memory)
    return ctypes.addressof(owner), owner
