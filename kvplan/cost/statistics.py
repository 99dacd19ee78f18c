"""The counts of a plan that the cost model reads. They are of its program: of its units, only their number counts."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import NamedTuple

from kvplan.cost.policy import HOST_ROUTES
from kvplan.plan.layers import Edges, cut_groups
from kvplan.plan.packing import staging_of
from kvplan.plan.plan import Plan
from kvplan.program.program import RunGroup

# The driver's batch call treats copies of at least this many bytes in another way, on H100, A30 and GB10.
LARGE = 28 << 10


class GroupFacts(NamedTuple):
    """The counts of one unit of a run group.

    Attributes:
        nbytes: bytes of a unit.
        alignment: largest power of two that divides every address and size.
        granule_nbytes: bytes of a granule, which the ring of the staged path must hold whole; 0 if no side is the host.
        terms: for each path, the counts of its terms (:data:`kvplan.cost.profile.TERMS`) after ``fixed``.
    """

    nbytes: int
    alignment: int
    granule_nbytes: int
    terms: Mapping[str, tuple[float, ...]]


Counted = tuple[GroupFacts, int]  # a run group, and its number of units

# For each run group, its counts by direction and edges.
_known: weakref.WeakKeyDictionary[RunGroup, dict[tuple[str, Edges], GroupFacts]] = weakref.WeakKeyDictionary()


def counted(plan: Plan, edges: Edges = ()) -> list[Counted]:
    """Return the run groups of a plan and the number of their units.

    Args:
        plan: the plan.
        edges: for a transfer by layers, the number of layers before each group of layers, and after the last. A unit
            then counts as the sum of its pieces, which may be shorter on the host.

    >>> import kvplan, numpy as np
    >>> gpu = kvplan.KVLayout.from_tensors("layer block token dim", np.zeros((4, 8, 16, 64), np.int8))
    >>> host = kvplan.KVLayout.from_tensors("block layer token dim", np.zeros((8, 4, 16, 64), np.int8))
    >>> plan = kvplan.compile(gpu, host).plan([1, 3], [3, 4])
    >>> [(facts.nbytes, facts.terms["kernel"], units) for facts, units in counted(plan)]
    [(4096, (4, 4096), 2)]
    """
    return [(facts_in(plan, part.group, edges), int(part.units.shape[1])) for part in plan.parts if part.nbytes]


def facts_in(plan: Plan, group: RunGroup, edges: Edges) -> GroupFacts:
    """Return the counts of one unit of a plan's run group, made once; see :func:`counted`."""
    known, key = _known.setdefault(group, {}), (plan.direction, edges)
    if key not in known:
        pieces = [group]
        if len(edges) > 2:
            pieces = [cut.group for _, cuts in cut_groups(plan, edges) for cut in cuts if cut.whole is group]
        sizes, alignments, granules, terms = zip(*(facts_of(piece, plan.direction) for piece in pieces), strict=True)
        added = {path: tuple(map(sum, zip(*(one[path] for one in terms), strict=True))) for path in terms[0]}
        known[key] = GroupFacts(sum(sizes), min(alignments), max(granules), added)
    return known[key]


def facts_of(group: RunGroup, direction: str) -> GroupFacts:
    """Return the counts of one unit of a run group for a direction."""
    sizes, granule_nbytes = group.packed[2], 0
    rows = sum(run.copies for run in group.runs)
    calls = sum(run.copies // _height(run.loops) for run in group.runs)
    terms = {
        "kernel": (sizes.size, group.nbytes),
        "copy_engine": (int((sizes < LARGE).sum()), int((sizes >= LARGE).sum()), group.nbytes),
        "copy_engine_2d": (calls, rows, group.nbytes),
    }
    if direction in HOST_ROUTES:
        staging = staging_of(group, direction)
        extents, granule_nbytes = staging.extents[2], staging.nbytes
        small = int((extents < LARGE).sum())
        large = extents.size - small
        terms["staged"] = (small / staging.granule_units, large / staging.granule_units, group.nbytes)
    return GroupFacts(group.nbytes, group.alignment, granule_nbytes, terms)


def _height(loops: tuple[tuple[int, int, int], ...]) -> int:
    """Return the rows of one 2-D copy of a run."""
    return max((count for count, src_stride, dst_stride in loops if src_stride > 0 and dst_stride > 0), default=1)
