"""Layouts in pickles: facts and addresses, as in a dump, and no memory.

A pickle may be loaded anywhere, and could hold no memory but a copy, at another address. So a loaded layout says that
its addresses are not of this process's memory, and nothing is moved through it. The exception is a pool that processes
share by name: while it is in use, a process that loads its layout maps it, and addresses are moved to that mapping.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from kvplan.layout.components import Built, Pool, Region
from kvplan.layout.strides import Int64Array


def record_of(built: Built) -> Built:
    """Take the tensors out of a layout; its addresses become a record.

    >>> import numpy as np
    >>> from kvplan import KVLayout
    >>> record_of(KVLayout.from_tensors("block dim", np.zeros((8, 64), np.int8)).built).regions[0].recorded
    True
    """
    regions = tuple(replace(r, owner=None, held=None, recorded=not r.virtual) for r in built.regions)
    return built._replace(regions=regions)


def mapped(built: Built) -> Built | None:
    """Move a record to this process's mappings of its pools; None where a region lies in no pool that is in use."""
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
        seams = tuple(seam + shift for seam in region.seams)
        # This process has pinned nothing of it.
        regions.append(replace(region, address=region.address + shift, pinned=False, seams=seams, owner=memory,
                               recorded=False, pool=pool))  # fmt: skip
    shifts = Shifts.between([region.address for region in built.regions], regions)
    first = shifts.of(np.array([component.address for component in built.components], dtype=np.int64)).tolist()
    components = tuple(
        replace(component, address=component.address + shift)
        for component, shift in zip(built.components, first, strict=True)
    )
    return built._replace(components=components, regions=tuple(regions))


class Shifts(NamedTuple):
    """Distances by which regions that do not overlap were moved.

    Attributes:
        starts: their former addresses, ascending.
        far: bytes from there to their present addresses.
    """

    starts: Int64Array
    far: Int64Array

    @classmethod
    def between(cls, before: Sequence[int], now: Sequence[Region]) -> Shifts:
        """Compare former addresses of regions with the regions as they are now, in the same order."""
        starts = np.array(before, dtype=np.int64)
        order = np.argsort(starts, kind="stable")
        ends = np.array([region.address for region in now], dtype=np.int64)
        return cls(starts[order], (ends - starts)[order])

    def of(self, addresses: Int64Array) -> Int64Array:
        """Bytes by which each of these addresses was moved with its region."""
        return self.far[np.maximum(np.searchsorted(self.starts, addresses, side="right") - 1, 0)]

    def moved(self, addresses: Int64Array) -> Int64Array:
        """Present addresses of the bytes at former addresses; ascending, each once."""
        return np.unique(addresses + self.of(addresses))
