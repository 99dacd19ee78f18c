"""Find conflicts: two plans must keep their order if one plan writes bytes that the other plan reads or writes."""

from __future__ import annotations

import numpy as np

from kvplan.layout.strides import Int64Array
from kvplan.plan.descriptors import Part
from kvplan.plan.plan import Plan

READ, WRITTEN = 0, 1  # rows of a part's units


def conflict(first: Plan, second: Plan) -> bool:
    """Return whether one plan writes a byte that the other plan reads or writes, so that their order matters.

    Only addresses are compared: memory that is mapped twice counts as two different memories.

    >>> import kvplan, numpy as np
    >>> a, b = (kvplan.KVLayout.from_tensors("block dim", np.zeros((8, 64), np.int8)) for _ in range(2))
    >>> program, back = kvplan.compile(a, b), kvplan.compile(b, a)
    >>> plan = program.plan([0, 1], [2, 3])
    >>> [conflict(plan, other) for other in (program.plan([0], [4]), program.plan([5], [3]), back.plan([2], [7]))]
    [False, True, True]
    """
    return any(
        _meet(one, side, other, its)
        for one in first.parts
        for other in second.parts
        for side, its in ((WRITTEN, WRITTEN), (WRITTEN, READ), (READ, WRITTEN))
    )


def _meet(one: Part, side: int, other: Part, its: int) -> bool:
    """Return whether one side of a part and one side of another part have a byte in common."""
    mine, theirs = one.units[side], other.units[its]
    if not mine.size or not theirs.size:
        return False
    (low, high), (its_low, its_high) = one.group.hulls[side], other.group.hulls[its]
    if mine.max() + high <= theirs.min() + its_low or theirs.max() + its_high <= mine.min() + low:
        return False
    if one.group is other.group and side == its:  # two units of one layout are equal or do not overlap
        return bool(np.isin(mine, theirs).any())
    starts, ends = _union(one, side)
    its_starts, its_ends = _union(other, its)
    after = np.searchsorted(ends, its_starts, side="right")  # the first run that ends after each start
    inside = after < ends.size
    return bool((starts[after[inside]] < its_ends[inside]).any())


def _union(part: Part, side: int) -> tuple[Int64Array, Int64Array]:
    """Return the first byte and the end of every run of every unit, both in ascending order.

    A run that lies inside an earlier run gets the earlier run's end. The covered bytes stay the same.
    """
    offsets, size = part.group.offsets[side], part.group.offsets[2]
    starts = (part.units[side][:, None] + offsets).ravel()
    order = np.argsort(starts, kind="stable")
    ends = (starts + np.tile(size, part.units.shape[1]))[order]
    return starts[order], np.maximum.accumulate(ends)
