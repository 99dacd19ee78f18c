"""Plans in pickles: facts and addresses, and no memory; see :mod:`kvplan.layout.pickling` for those of layouts."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from kvplan.layout.pickling import Shifts
from kvplan.layout.strides import Int64Array
from kvplan.plan.descriptors import Part, Seams
from kvplan.program.program import Run, RunGroup

if TYPE_CHECKING:
    from kvplan.layout.kvlayout import KVLayout
    from kvplan.plan.copy_program import CopyProgram
    from kvplan.plan.plan import Plan

Starts = tuple[int, ...]  # address of each region of a layout, when it was pickled


def facts_of_plan(plan: Plan) -> tuple[Any, ...]:
    """All of a plan, and where the regions of its layouts begin here; nothing of such without a shared pool."""
    starts: tuple[tuple[Starts, Starts], ...] = ()
    if any(region.pool for pair in plan.layouts for layout in pair for region in layout.regions):
        starts = tuple((_starts(src), _starts(dst)) for src, dst in plan.layouts)
    return (
        plan.parts, plan.units, plan.nbytes, plan.direction, plan.layouts, plan.seams, plan.skips, plan.programs, starts
    )  # fmt: skip


def _starts(layout: KVLayout) -> Starts:
    return tuple(region.address for region in layout.regions)


def plan_of_facts(
    parts: tuple[Part, ...],
    units: int,
    nbytes: int,
    direction: str,
    layouts: tuple[tuple[KVLayout, KVLayout], ...],
    seams: Seams,
    skips: tuple[tuple[int, int], ...],
    programs: tuple[CopyProgram, ...],
    starts: tuple[tuple[Starts, Starts], ...],
) -> Plan:
    """What a pickled plan is loaded as; its addresses are moved as far as those of its layouts were."""
    from kvplan.plan.plan import Plan

    if starts:
        src, dst = (
            Shifts.between(
                [address for pair in starts for address in pair[side]],
                [region for pair in layouts for region in pair[side].regions],
            )
            for side in (0, 1)
        )
        made = {part.group: _moved_group(part.group, src, dst) for part in parts}
        parts = tuple(Part(made[part.group][0], part.units + made[part.group][1]) for part in parts)
        seams = Seams(src.moved(seams.src), dst.moved(seams.dst))
    if any(layout.addresses != "memory" for pair in layouts for layout in pair):
        # A pool may have gone between the loading of two layouts: submits ask programs first.
        programs = tuple(program for program in programs if not program.movable)
    return Plan(parts, units, nbytes, direction, layouts, seams, skips, programs)


def _moved_group(group: RunGroup, src: Shifts, dst: Shifts) -> tuple[RunGroup, Int64Array]:
    """Runs where their regions went, and how far their units went: (2, 1) int64.

    All blocks of a run lie in one pool, but runs of one group may lie in several, whose distances change.
    """
    src_offset, dst_offset, nbytes = group.offsets
    src_far, dst_far = src.of(src_offset + group.src_base), dst.of(dst_offset + group.dst_base)
    alike = bool((src_far == src_far[0]).all() and (dst_far == dst_far[0]).all())
    if alike and not src_far[0] and not dst_far[0]:
        return group, np.zeros((2, 1), dtype=np.int64)
    if alike:
        runs, far = group.runs, (int(src_far[0]), int(dst_far[0]))
    else:
        src_offset, dst_offset = src_offset + src_far, dst_offset + dst_far
        far = int(src_offset.min()), int(dst_offset.min())
        rows = zip((dst_offset - far[1]).tolist(), (src_offset - far[0]).tolist(), nbytes.tolist(), strict=True)
        runs = tuple(Run(first, to, size, ()) for to, first, size in sorted(rows))
    moved = replace(group, src_base=group.src_base + far[0], dst_base=group.dst_base + far[1], runs=runs)
    return moved, np.array(far, dtype=np.int64)[:, None]
