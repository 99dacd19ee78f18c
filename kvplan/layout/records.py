"""Layouts in pickles: facts and addresses, as in a dump, and no memory.

A pickle may be loaded in any process, and could hold only a copy of the memory, at another address. So a loaded layout
is marked as a record, and cannot move bytes. The exception is a pool that processes share by name. While the pool is in
use, a process that loads its layout maps the pool, and the layout gets the addresses of that mapping.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from kvplan.layout.components import Built, Form, Pool, Region


def record_of(built: Built) -> Built:
    """Return a layout without its tensors, whose addresses are marked as recorded.

    >>> import numpy as np
    >>> from kvplan import KVLayout
    >>> record_of(KVLayout.from_tensors("block dim", np.zeros((8, 64), np.int8)).built).regions[0].recorded
    True
    """
    regions = tuple(replace(r, owner=None, held=None, recorded=not r.virtual) for r in built.regions)
    return built._replace(regions=regions)


def mapped(built: Built) -> Built | None:
    """Return a record at this process's mappings of its pools; None if a region lies in no pool that is in use."""
    pools = dict.fromkeys(region.pool for region in built.regions)
    here: dict[Pool | None, tuple[Pool, Any]] = {}
    for pool in pools:
        found = pool.attach(pool) if pool is not None and None not in pools else None
        if pool is None or found is None:
            return None
        here[pool] = pool._replace(address=found[0]), found[1]
    regions = []
    for region in built.regions:
        pool, memory = here[region.pool]
        shift = pool.address - region.pool.address if region.pool is not None else 0
        # This process has not pinned the mapping.
        regions.append(replace(region, address=region.address + shift, pinned=False, owner=memory, recorded=False,
                               pool=pool))  # fmt: skip
    return relocated(built, regions)


def relocated(built: Built, regions: Sequence[Region]) -> Built:
    """Return a layout whose regions, with the seams and the content in them, have moved.

    Args:
        built: the layout. Regions that touch or nest move together.
        regions: its regions at their present addresses, in the same order. Their seams are not read.
    """
    before, now = (np.array([region.address for region in some], dtype=np.int64) for some in (built.regions, regions))
    order = np.argsort(before, kind="stable")
    starts, shifts = before[order], (now - before)[order]

    def there(addresses: Sequence[int]) -> list[int]:
        asked = np.array(addresses, dtype=np.int64)
        moved: list[int] = (asked + shifts[np.maximum(np.searchsorted(starts, asked, side="right") - 1, 0)]).tolist()
        return moved

    forms: dict[tuple[int, tuple[int, ...]], Form] = {}
    components = []
    firsts = there([component.address for component in built.components])
    for component, first in zip(built.components, firsts, strict=True):
        form = component.form
        if form.table is not None:  # blocks of a table may lie in several regions
            table = tuple(at - first for at in there([component.address + step for step in form.table]))
            form = forms.setdefault((id(form), table), replace(form, table=table))
        components.append(replace(component, address=first, form=form))
    present = tuple(
        replace(region, seams=tuple(seam + region.address - old.address for seam in old.seams))
        for old, region in zip(built.regions, regions, strict=True)
    )
    return built._replace(components=tuple(components), regions=present)
