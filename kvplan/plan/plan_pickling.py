"""Move the addresses of a pickled plan as far as its layouts moved. :mod:`kvplan.layout.records` pickles layouts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from kvplan.layout.records import Shifts
from kvplan.layout.strides import Int64Array
from kvplan.plan.descriptors import Part, Seams
from kvplan.program.program import Run, RunGroup

if TYPE_CHECKING:
    from kvplan.layout.kvlayout import KVLayout

Starts = tuple[tuple[int, ...], ...]  # per side, each region's address before pickling; () without a shared pool


def starts_of(layouts: Sequence[tuple[KVLayout, KVLayout]]) -> Starts:
    """Return the addresses of the regions of a plan's layouts in this process; () if no region is in a shared pool."""
    if not any(region.pool for pair in layouts for layout in pair for region in layout.regions):
        return ()
    return tuple([tuple(region.address for pair in layouts for region in pair[side].regions) for side in (0, 1)])


def moved(
    parts: tuple[Part, ...], seams: Seams, layouts: Sequence[tuple[KVLayout, KVLayout]], starts: Starts
) -> tuple[tuple[Part, ...], Seams]:
    """Return the parts and seams of a plan, moved as far as its layouts' regions have moved since :func:`starts_of`."""
    if not starts:
        return parts, seams
    src, dst = (
        Shifts.between(starts[side], [region for pair in layouts for region in pair[side].regions]) for side in (0, 1)
    )
    made = {part.group: _moved_group(part.group, src, dst) for part in parts}
    parts = tuple(Part(made[part.group][0], part.units + made[part.group][1]) for part in parts)
    return parts, Seams(src.moved(seams.src), dst.moved(seams.dst))


def _moved_group(group: RunGroup, src: Shifts, dst: Shifts) -> tuple[RunGroup, Int64Array]:
    """Move the runs of a run group with their regions; return the group and the bytes that its units move, (2, 1).

    All blocks of a run are in one pool. The runs of one group may be in several pools, whose distances change.
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
