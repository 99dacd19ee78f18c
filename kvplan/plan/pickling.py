"""Layouts and plans in pickles: facts and addresses, as in a dump, and no memory.

A pickle may be loaded anywhere, and of memory it could only hold a copy, at another address. So what comes out of one
says that its addresses are not of this process's memory, and nothing is moved through it. A pool that processes share
by name is the exception: while it is in use, who loads its layout maps it, and addresses are moved to that mapping.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kvplan.layout.build import Built
from kvplan.layout.components import Pool, Region
from kvplan.layout.strides import Int64Array
from kvplan.plan.descriptors import Part, Seams
from kvplan.program.program import Run, RunGroup

if TYPE_CHECKING:
    from kvplan.layout.kvlayout import KVLayout
    from kvplan.memory.shared import Shared

Starts = tuple[tuple[int, ...], ...]  # of each side: address of every region when it was pickled; () without a pool


def facts_of(layout: KVLayout) -> tuple[Built, str]:
    """Parts and notation of a layout, without the tensors.

    >>> import numpy as np
    >>> from kvplan.layout.kvlayout import KVLayout
    >>> facts_of(KVLayout.from_tensors("block dim", np.zeros((8, 64), np.int8)))[0].regions[0].recorded
    True
    """
    regions = tuple(replace(r, owner=None, held=None, recorded=not r.virtual) for r in layout.regions)
    built = Built(
        layout.components, regions, layout.num_blocks, layout.block_tokens, layout.sizes, layout.dtype
    )  # fmt: skip
    return built, layout.notation


def layout_of_facts(built: Built, notation: str) -> KVLayout:
    """What a pickled layout is loaded as: over its pools where all of it lies in such that are in use, or a record."""
    from kvplan.layout.kvlayout import KVLayout

    return KVLayout(_mapped(built) or built, notation=notation)


def _mapped(built: Built) -> Built | None:
    """The same in this process's mappings of the pools; None where some of it lies in none that can be mapped."""
    pools = dict.fromkeys(region.pool for region in built.regions)
    if None in pools:
        return None
    here: dict[Pool | None, tuple[Pool, Any]] = {}
    for pool in pools:
        found = _attach(pool) if pool is not None else None
        if pool is None or found is None:
            return None
        here[pool] = pool._replace(address=int(found.memory.ctypes.data)), found.memory
    regions = []
    for region in built.regions:
        pool, memory = here[region.pool]
        shift = pool.address - region.pool.address if region.pool is not None else 0
        seams = tuple(seam + shift for seam in region.seams)
        # This process has pinned nothing of it.
        regions.append(replace(region, address=region.address + shift, pinned=False, seams=seams, owner=memory,
                               recorded=False, pool=pool))  # fmt: skip
    shifts = _Shifts.between([region.address for region in built.regions], regions)
    first = shifts.of(np.array([component.address for component in built.components], dtype=np.int64)).tolist()
    components = tuple(
        replace(component, address=component.address + shift)
        for component, shift in zip(built.components, first, strict=True)
    )
    return built._replace(components=components, regions=tuple(regions))


def _attach(pool: Pool) -> Shared | None:
    from kvplan.memory.shared import attach

    return attach(pool.path, pool.geometry, [pool.nbytes] * pool.tensors, pool.token)


class _Shifts(NamedTuple):
    """How far regions that do not overlap went from where they were.

    Attributes:
        starts: where they were, ascending.
        far: bytes from there to where they are.
    """

    starts: Int64Array
    far: Int64Array

    @classmethod
    def between(cls, before: Sequence[int], now: Sequence[Region]) -> _Shifts:
        """Of regions in the order of their former addresses, or in any other, as long as both are given alike."""
        starts = np.array(before, dtype=np.int64)
        order = np.argsort(starts, kind="stable")
        ends = np.array([region.address for region in now], dtype=np.int64)
        return cls(starts[order], (ends - starts)[order])

    def of(self, addresses: Int64Array) -> Int64Array:
        """Bytes that each of these addresses went with its region."""
        return self.far[np.maximum(np.searchsorted(self.starts, addresses, side="right") - 1, 0)]

    def moved(self, addresses: Int64Array) -> Int64Array:
        """Where the bytes at these addresses are now, ascending, each once."""
        return np.unique(addresses + self.of(addresses))


def starts_of(layouts: Sequence[tuple[KVLayout, KVLayout]]) -> Starts:
    """Where the regions of a plan's layouts begin here; nothing where none of them lies in a shared pool."""
    if not any(region.pool for pair in layouts for layout in pair for region in layout.regions):
        return ()
    return tuple([tuple(region.address for pair in layouts for region in pair[side].regions) for side in (0, 1)])


def moved(
    parts: tuple[Part, ...], seams: Seams, layouts: Sequence[tuple[KVLayout, KVLayout]], starts: Starts
) -> tuple[tuple[Part, ...], Seams]:
    """The parts and seams of a plan, moved as far as the regions of its layouts were since :func:`starts_of`."""
    if not starts:
        return parts, seams
    src, dst = (
        _Shifts.between(starts[side], [region for pair in layouts for region in pair[side].regions]) for side in (0, 1)
    )
    made = {part.group: _moved_group(part.group, src, dst) for part in parts}
    parts = tuple(Part(made[part.group][0], part.units + made[part.group][1]) for part in parts)
    return parts, Seams(src.moved(seams.src), dst.moved(seams.dst))


def _moved_group(group: RunGroup, src: _Shifts, dst: _Shifts) -> tuple[RunGroup, Int64Array]:
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
