"""Whether two plans have an order: one writes what the other reads or writes."""

from __future__ import annotations

import numpy as np

from kvplan.layout.strides import Int64Array
from kvplan.plan.descriptors import Part
from kvplan.plan.plan import Plan

READ, WRITTEN = 0, 1  # rows of a part's units


def conflict(first: Plan, second: Plan) -> bool:
    """Whether a byte that one plan writes is read or written by the other, so that their order is seen.

    Told from addresses: memory that is mapped twice counts as two.

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
    """Whether the bytes of one side of a part meet those of one side of another."""
    mine, theirs = one.units[side], other.units[its]
    if not mine.size or not theirs.size:
        return False
    (low, high), (its_low, its_high) = one.group.hulls[side], other.group.hulls[its]
    if mine.max() + high <= theirs.min() + its_low or theirs.max() + its_high <= mine.min() + low:
        return False
    if one.group is other.group and side == its:  # units of one layout are apart, or the same
        return bool(np.isin(mine, theirs).any())
    starts, ends = _union(one, side)
    its_starts, its_ends = _union(other, its)
    after = np.searchsorted(ends, its_starts, side="right")  # the first that ends behind each start
    inside = after < ends.size
    return bool((starts[after[inside]] < its_ends[inside]).any())


def _union(part: Part, side: int) -> tuple[Int64Array, Int64Array]:
    """Every run of every unit, ascending; ends never descend: a run inside an earlier one counts as its rest."""
    offsets, size = part.group.offsets[side], part.group.offsets[2]
    starts = (part.units[side][:, None] + offsets).ravel()
    order = np.argsort(starts, kind="stable")
    ends = (starts + np.tile(size, part.units.shape[1]))[order]
    return starts[order], np.maximum.accumulate(ends)
