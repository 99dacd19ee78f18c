"""Reserve addresses for the layout of another process. Only touched pages take memory."""

from __future__ import annotations

import ctypes
import mmap
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from kvplan.errors import LayoutError
from kvplan.layout.components import Component
from kvplan.layout.kvlayout import KVLayout

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
    regions = sorted(layout.regions, key=lambda region: region.address)
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
    shifts = [base + place - region.address for place, region in zip(places, regions, strict=True)]
    moved = tuple(
        replace(
            region,
            address=region.address + shift,
            device="cpu",
            pinned=False,
            writable=True,
            virtual=False,
            recorded=False,
            seams=tuple(seam + shift for seam in region.seams),
            owner=owner,
            held=None,
            pool=None,
        )
        for region, shift in zip(regions, shifts, strict=True)
    )
    firsts = [region.address for region in regions]

    def there(address: int) -> int:
        k = bisect_right(firsts, address) - 1
        while regions[k].end <= address:  # the region that begins last may lie in another one and end before it
            k -= 1
        return address + shifts[k]

    components = tuple(_moved(component, there) for component in layout.components)
    return KVLayout(layout.built._replace(components=components, regions=moved))


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


def _moved(component: Component, there: Callable[[int], int]) -> Component:
    """Return a component at its region's new address; blocks of a table may lie in several regions."""
    form, address = component.form, there(component.address)
    if form.table is not None:
        table = tuple(there(component.address + step) - address for step in form.table)
        form = replace(form, table=table)
    return replace(component, address=address, form=form)
