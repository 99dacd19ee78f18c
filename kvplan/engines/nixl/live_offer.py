"""The memory that peers may name in packed transfers; it changes when an engine registers and deregisters memory."""

from __future__ import annotations

from collections.abc import Iterable

from kvplan.layout.kvlayout import KVLayout
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
