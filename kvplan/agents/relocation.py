"""Layouts of a card, moved to the addresses at which their memory is mapped in this process."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from kvplan.agents.transport import Mapped
from kvplan.layout.components import Component, Region
from kvplan.layout.holding import Holding
from kvplan.layout.kvlayout import KVLayout


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

    def of(address: int) -> Mapped:
        return mapped[bisect_right(starts, address) - 1]

    def there(address: int) -> int:
        return address + of(address).here - of(address).theirs

    regions = []
    for region in layout.regions:
        place = of(region.address)
        shift = place.here - place.theirs
        regions.append(
            Region(
                region.address + shift,
                region.nbytes,
                place.device,
                writable=region.writable and place.writable,
                seams=tuple(seam + shift for seam in region.seams),
                owner=place.owner,
                held=Holding(place.owner.present, place.owner.present(), (), 0),
            )
        )
    components = tuple(_moved(component, there(component.address), there) for component in layout.components)
    ordered = tuple(sorted(regions, key=lambda region: region.address))
    return KVLayout(layout.built._replace(components=components, regions=ordered))


def _moved(component: Component, address: int, there: Callable[[int], int]) -> Component:
    form = component.form
    if form.table is not None:  # blocks of a table may lie in several mappings
        form = replace(form, table=tuple(there(component.address + step) - address for step in form.table))
    return replace(component, address=address, form=form)
