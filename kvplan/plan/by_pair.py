"""Values that are kept for each pair of layouts, while both layouts live."""

from __future__ import annotations

import weakref
from typing import Generic, TypeVar

from kvplan.layout.kvlayout import KVLayout
from kvplan.plan.plan import Plan

MOST = 1000  # pairs; then all are forgotten

Known = TypeVar("Known")


class ByPair(Generic[Known]):
    """Values by pair of layouts. Plans of several pairs have none.

    >>> import kvplan, numpy as np
    >>> a, b = (kvplan.KVLayout.from_tensors("block dim", np.zeros((4, 8), np.int8)) for _ in range(2))
    >>> found, plan = ByPair[str](), kvplan.compile(a, b).plan([0], [1])
    >>> found.get(plan), found.keep(plan, "known"), found.get(kvplan.compile(a, b).plan([2], [3]))
    (None, 'known', 'known')
    """

    def __init__(self) -> None:
        # By the ids of both layouts: another layout may have an id later, so the layouts are compared, too.
        self._known: dict[tuple[int, int], tuple[weakref.ref[KVLayout], weakref.ref[KVLayout], Known]] = {}

    def get(self, plan: Plan) -> Known | None:
        """Return the value of a plan's pair, or None."""
        layouts = plan.layouts
        if len(layouts) == 1:  # as in most plans
            src, dst = layouts[0]
            known = self._known.get((id(src), id(dst)))
            if known is not None and known[0]() is src and known[1]() is dst:
                return known[2]
        return None

    def keep(self, plan: Plan, value: Known) -> Known:
        """Keep a value for a plan's pair, and return it."""
        layouts = plan.layouts
        if len(layouts) == 1:
            if len(self._known) >= MOST:
                self._known.clear()
            src, dst = layouts[0]
            self._known[id(src), id(dst)] = weakref.ref(src), weakref.ref(dst), value
        return value
