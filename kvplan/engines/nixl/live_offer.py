"""The memory that peers may name in packed transfers; it changes when an engine registers and deregisters memory."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from kvplan.agents.packed.pack_jobs import Job
from kvplan.agents.packed.pack_transfer import Inbound
from kvplan.layout.kvlayout import KVLayout
from kvplan.plan.packing.chunk_half import Slot
from kvplan.plan.packing.pack_checks import Offered


class LiveOffer(Offered):
    """Layouts that peers may read and write now; none at first.

    >>> import numpy as np
    >>> from kvplan.plan.row_plans import Memory, layout_of
    >>> pool = np.zeros(64, np.uint8)
    >>> offer = LiveOffer()
    >>> offer.renew([layout_of([Memory(pool.ctypes.data, 64, "cpu")])])
    >>> len(offer.current().layouts), len(offer.layouts)
    (1, 0)
    """

    def __init__(self) -> None:
        super().__init__(())
        self._now = Offered(())

    def current(self) -> Offered:
        """Return the layouts that are offered now; they do not change."""
        return self._now

    def renew(self, layouts: Iterable[KVLayout]) -> None:
        """Offer these layouts, and no others."""
        self._now = Offered(layouts)

    def holds(self, one: Job | Inbound, slot: Slot) -> bool:
        """Return whether all memory that a peer's transfer names is offered now.

        Args:
            one: the transfer.
            slot: any slot of the ring.
        """
        ranges = list[list[int]]()
        regions = {(region.address, region.end) for layout in self._now.layouts for region in layout.regions}
        for first, end in sorted(regions):
            if ranges and first <= ranges[-1][1]:
                ranges[-1][1] = max(end, ranges[-1][1])
            else:
                ranges.append([first, end])
        if not ranges:
            return False
        firsts, ends = np.array(ranges, dtype=np.int64).T
        for row in one.rows:
            moved = row.planned(slot).descriptors()
            address = moved.src if isinstance(one, Job) else moved.dst
            found = np.searchsorted(firsts, address, side="right") - 1
            if bool((found < 0).any()) or bool((address + moved.size > ends[found]).any()):
                return False
        return True
