"""Split a plan into two plans: a plan of its large runs, and a plan of its small runs."""

from __future__ import annotations

import weakref
from dataclasses import replace

from kvplan.plan.descriptors import Part
from kvplan.plan.plan import Plan, narrowed
from kvplan.program.program import RunGroup

LARGE_RUN = 64 << 10  # bytes: the copy engine moves runs of at least this size

Halves = tuple[Plan | None, Plan | None]
# The halves of a run group are kept as long as the run group, so that their run tables are uploaded once.
_known: weakref.WeakKeyDictionary[RunGroup, tuple[RunGroup | None, RunGroup | None]] = weakref.WeakKeyDictionary()


def halves_of(plan: Plan) -> Halves:
    """Split a plan into runs of at least :data:`LARGE_RUN` bytes and smaller runs; None for a half without runs.

    >>> import kvplan, numpy as np
    >>> pages, states = np.zeros((4, 8, 16, 64), np.int8), np.zeros((8, 1, 1 << 17), np.int8)
    >>> kv, held = (kvplan.KVLayout.from_tensors(text, tensor) for text, tensor in
    ...             (("layer block token dim", pages), ("block token dim", states)))
    >>> plan = kvplan.join([kvplan.compile(one, one).plan([0], [5]) for one in (kv, held)])
    >>> halves_of(plan)
    (Plan(host of 2 units, 131072 bytes), Plan(host of 2 units, 4096 bytes))
    """
    large: list[tuple[Part, tuple[int, int]]] = []
    small: list[tuple[Part, tuple[int, int]]] = []
    for part, skip in zip(plan.parts, plan.skips, strict=True):
        if part.units.shape[1]:
            for side, group in zip((large, small), group_halves(part.group), strict=True):
                if group is not None:
                    side.append((Part(group, part.units), skip))
    return narrowed(plan, large) if large else None, narrowed(plan, small) if small else None


def group_halves(group: RunGroup) -> tuple[RunGroup | None, RunGroup | None]:
    """Split a run group into its large and its small runs; None for a half without runs."""
    known = _known.get(group)
    if known is None:
        large = tuple(run for run in group.runs if run.nbytes >= LARGE_RUN)
        small = tuple(run for run in group.runs if run.nbytes < LARGE_RUN)
        made = [replace(group, runs=runs) if runs else None for runs in (large, small)]
        known = _known.setdefault(group, (made[0], made[1]))  # two threads get the same pair, hence one run table
    return known
