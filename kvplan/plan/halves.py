"""A plan as two: its large runs, and its small ones."""

from __future__ import annotations

import weakref
from dataclasses import replace

from kvplan.plan.descriptors import Part
from kvplan.plan.plan import Plan
from kvplan.program.program import RunGroup

LARGE_RUN = 64 << 10  # bytes: from here on the copy engine takes a run

Halves = tuple[Plan | None, Plan | None]
# Halves of a group live as long as it, so that their run tables are uploaded once.
_known: weakref.WeakKeyDictionary[RunGroup, tuple[RunGroup | None, RunGroup | None]] = weakref.WeakKeyDictionary()


def halves_of(plan: Plan) -> Halves:
    """The same byte moves as two plans: runs of :data:`LARGE_RUN` bytes or more, and shorter ones; None for no such.

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
    return _plan_of(plan, large), _plan_of(plan, small)


def group_halves(group: RunGroup) -> tuple[RunGroup | None, RunGroup | None]:
    """A run group of the large runs and one of the small ones; None for a kind that it has not."""
    known = _known.get(group)
    if known is None:
        large = tuple(run for run in group.runs if run.nbytes >= LARGE_RUN)
        small = tuple(run for run in group.runs if run.nbytes < LARGE_RUN)
        made = [replace(group, runs=runs) if runs else None for runs in (large, small)]
        known = _known.setdefault(group, (made[0], made[1]))  # of two threads, both get one pair: its table is one
    return known


def _plan_of(plan: Plan, held: list[tuple[Part, tuple[int, int]]]) -> Plan | None:
    if not held:
        return None
    parts = tuple(part for part, _ in held)
    nbytes = sum(part.nbytes for part in parts)
    skips = tuple(skip for _, skip in held)
    return Plan(parts, plan.units, nbytes, plan.direction, plan.layouts, plan.seams, skips, plan.programs)
