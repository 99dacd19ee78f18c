"""Split plans and programs by layers, so that each layer arrives before the next; all pieces move the same bytes."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from kvplan.layout.strides import Int64Array
from kvplan.plan.descriptors import Part
from kvplan.plan.plan import Plan, PlannedBy
from kvplan.program.program import BlockAxis, RunGroup

Layers = frozenset[int]
Edges = tuple[int, ...]


class Cut(NamedTuple):
    """A run group of a plan, and what it is for some layers.

    Attributes:
        whole: the run group of the plan.
        group: the run group of some of its layers.
    """

    whole: RunGroup
    group: RunGroup

    @property
    def step(self) -> Int64Array:
        """Bytes from the addresses of a unit of ``whole`` to those of ``group``, on both sides: (2, 1) int64."""
        (whole, group) = self
        return np.array([[group.src_base - whole.src_base], [group.dst_base - whole.dst_base]], dtype=np.int64)


def even_edges(layers: int, groups: int) -> Edges:
    """Return the edges of groups of about the same size: the number of layers before each group, and after the last.

    >>> even_edges(32, 4), even_edges(3, 8), even_edges(5, 0)
    ((0, 8, 16, 24, 32), (0, 1, 2, 3), (0, 5))
    """
    count = max(1, min(groups, layers))
    return tuple(layers * k // count for k in range(count + 1))


def cut_programs(
    programs: Sequence[PlannedBy], layers: Sequence[int], edges: Edges
) -> list[tuple[Layers, list[tuple[int, PlannedBy]]]] | None:
    """Cut programs by layers.

    Args:
        programs: the programs.
        layers: global numbers of all their layers, ascending.
        edges: number of layers before each piece, and after the last.

    Returns:
        For each piece, the global numbers of its layers, and its programs, each with its number; None if a program of
        fewer layers would have units of another size.
    """
    pieces = []
    for some in (frozenset(layers[a:b]) for a, b in pairwise(edges)):
        cut = []
        for number, program in enumerate(programs):
            wanted = tuple(layer for layer in program.src.layers if layer in some)
            if wanted:
                part = program.of_layers(wanted)
                if part.program.units != program.program.units:
                    return None
                cut.append((number, part))
        pieces.append((some, cut))
    return pieces


def split_layers(plan: Plan, edges: Edges) -> list[tuple[Layers, Plan]]:
    """Split a plan into plans of consecutive layers, in order of layers.

    If a program of fewer layers would have units of another size than the plan's, the plan is not split.

    Args:
        plan: the plan to split.
        edges: number of layers before each plan, and after the last.

    Returns:
        For each plan, the global numbers of its layers, and the plan.

    >>> import kvplan
    >>> gpu = kvplan.KVLayout.from_tensors("layer block token dim", np.zeros((4, 8, 16, 64), np.int8))
    >>> host = kvplan.KVLayout.from_tensors("block layer token dim", np.zeros((8, 4, 16, 64), np.int8))
    >>> plan = kvplan.compile(gpu, host).plan([1, 2], [3, 4])
    >>> [(sorted(layers), part) for layers, part in split_layers(plan, (0, 2, 4))]
    [([0, 1], Plan(host of 2 units, 4096 bytes)), ([2, 3], Plan(host of 2 units, 4096 bytes))]
    """
    pieces = cut_groups(plan, edges)
    if len(pieces) == 1:
        return [(pieces[0][0], plan)]
    made = []
    for layers, cuts in pieces:
        moved = [
            (Part(group, part.units + step), skip)
            for whole, group, step in [(*cut, cut.step) for cut in cuts]
            for part, skip in zip(plan.parts, plan.skips, strict=True)
            if part.group is whole
        ]
        parts, skips = zip(*moved, strict=True) if moved else ((), ())
        nbytes = sum(part.nbytes for part in parts)
        some = Plan(parts, plan.units, nbytes, plan.direction, plan.layouts, plan.seams, skips, plan.programs)
        made.append((layers, some))
    return made


# The pieces of a program's plans, by their edges and run groups. They refer to no program.
_Pieces = list[tuple[Layers, list[Cut]]]
_known: weakref.WeakKeyDictionary[PlannedBy, dict[tuple[Edges, Sequence[RunGroup]], _Pieces]] = (
    weakref.WeakKeyDictionary()
)


def cut_groups(plan: Plan, edges: Edges) -> _Pieces:
    """Cut the run groups of a plan as :func:`split_layers` does, without looking at any unit.

    Returns:
        For each piece, the global numbers of its layers, and its run groups: each with the run group of the plan that
        it is a part of. If the plan cannot be split, the one piece has the run groups of the plan.
    """
    groups = tuple(dict.fromkeys([part.group for part in plan.parts]))
    known = _known.setdefault(plan.programs[0], {}) if len(plan.programs) == 1 else {}
    pieces = known.get((edges, groups))
    if pieces is None:
        pieces = _cut(plan, groups, edges) or [(frozenset(plan.layers), [Cut(group, group) for group in groups])]
        known[edges, groups] = pieces
    return pieces


def _cut(plan: Plan, groups: Sequence[RunGroup], edges: Edges) -> _Pieces | None:
    """Return the pieces of run groups; None if the plan cannot be split."""
    if len(edges) < 3:
        return None
    left, owners, by_axes = set(groups), list[PlannedBy](), dict[tuple[int, BlockAxis, BlockAxis], RunGroup]()
    for program in plan.programs:
        mine = left.intersection(program.program.groups)
        if mine:
            by_axes |= {(len(owners), group.src, group.dst): group for group in mine}
            owners.append(program)
            left -= mine
    pieces = None if left else cut_programs(owners, plan.layers, edges)
    if pieces is None:
        return None
    made = []
    for layers, programs in pieces:
        parts = [(number, group) for number, program in programs for group in program.program.groups]
        wholes = [by_axes.get((number, group.src, group.dst)) for number, group in parts]
        if None in wholes:
            return None
        made.append((layers, [Cut(whole, group) for whole, (_, group) in zip(wholes, parts, strict=True) if whole]))
    return made
