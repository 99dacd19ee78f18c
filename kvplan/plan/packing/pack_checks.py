"""Checks of a recipe's addresses: they lie in offered memory, and no byte is written twice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvplan.base.limits import LIMITS
from kvplan.errors import TransferError
from kvplan.layout.components import touching_seams
from kvplan.layout.kvlayout import KVLayout
from kvplan.layout.strides import Int64Array

if TYPE_CHECKING:
    from kvplan.plan.packing.pack_recipe import Column


class Extents(NamedTuple):
    """The bytes of a unit at its own side.

    Attributes:
        start: first bytes, ascending, relative to the unit's address.
        size: bytes of each.
        twice: whether some byte belongs to two copies.
    """

    start: Int64Array
    size: Int64Array
    twice: bool

    def plus(self, other: Extents) -> Extents:
        """Return the extents of both."""
        both = extents_of(np.concatenate((self.start, other.start)), np.concatenate((self.size, other.size)))
        return Extents(both.start, both.size, self.twice or other.twice or both.twice)


def extents_of(start: Int64Array, size: Int64Array) -> Extents:
    """Join byte ranges that touch or overlap.

    >>> extents_of(np.array([8, 0, 4, 40]), np.array([8, 6, 4, 2]))
    Extents(start=array([ 0, 40]), size=array([16,  2]), twice=True)
    """
    order = np.argsort(start, kind="stable")
    first, last = start[order], (start + size)[order]
    reach = np.maximum.accumulate(last)
    cuts = np.flatnonzero(first[1:] > reach[:-1]) + 1
    twice = bool((first[1:] < reach[:-1]).any())
    begin = np.concatenate((first[:1], first[cuts]))
    return Extents(begin, np.concatenate((reach[cuts - 1], reach[-1:])) - begin, twice)


class Offered:
    """Layouts that a peer may read, or write, as sorted ranges of memory.

    Args:
        layouts: the layouts.
    """

    def __init__(self, layouts: Sequence[KVLayout]) -> None:
        self.layouts = tuple(layouts)
        regions = sorted(
            [(region.address, region.end, layout.writable, k) for k, layout in enumerate(layouts) for region in layout.regions]
        )
        self._regions = regions
