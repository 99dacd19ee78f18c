"""Layouts of a card, moved to the addresses at which their memory is mapped in this process."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import replace

from kvplan.agents.transport import Mapped
from kvplan.layout import records
from kvplan.layout.components import Region
from kvplan.layout.kvlayout import KVLayout
from kvplan.layout.tensors import Holding


def regions_of(layouts: Iterable[KVLayout]) -> list[Region]:
    """Return the regions of layouts, ascending and each once."""
    found: dict[tuple[int, int, str], Region] = {}
    for layout in layouts:
        for region in layout.regions:
            known = found.setdefault((region.address, region.nbytes, region.device), region)
            if region.writable and not known.writable:
                found[region.address, region.nbytes, region.device] = region
    return sorted(found.values(), key=lambda region: (region.address, -region.nbytes))


def relocated(layout: KVLayout, mapped: Sequence[Mapped]) -> KVLayout:
    """Return a layout of a card over this process's mappings of its memory.

    Args:
        layout: the layout, with addresses of the owner.
        mapped: the mappings, ascending by the owner's addresses; each region of the layout lies within one.
    """
    starts = [one.theirs for one in mapped]
    regions = []
    for region in layout.regions:
        place = mapped[bisect_right(starts, region.address) - 1]
        regions.append(
            replace(
                region, address=region.address + place.here - place.theirs, device=place.device, pinned=False,
                writable=region.writable and place.writable, virtual=False, owner=place.owner, recorded=False,
                held=Holding(place.owner.present, place.owner.present(), (), 0), pool=None,
            )
        )  # fmt: skip
    built = records.relocated(layout.built, regions)
    return KVLayout(built._replace(regions=tuple(sorted(built.regions, key=lambda region: region.address))))
