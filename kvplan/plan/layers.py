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
from kvplan.program.program import Program, RunGroup

Layers = frozenset[int]
Skips = tuple[int, int]
Edges = tuple[int, ...]


class Cut(NamedTuple):
    """A run group of a plan, and what it is for some layers.

    Attributes:
        whole: the run group of the plan.
        group: the run group of some of its layers.
        step: (2, 1) int64: bytes from the addresses of a unit of ``whole`` to those of ``group``, on both sides.
    """

    whole: RunGroup
    group: RunGroup
    step: Int64Array

    @classmethod
    def between(cls, whole: RunGroup, group: RunGroup) -> Cut:
        """Return the cut of a run group, with its step."""
        step = [[group.src_base - whole.src_base], [group.dst_base - whole.dst_base]]
        return cls(whole, group, np.array(step, dtype=np.int64))


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
                if _units(part.program) != _units(program.program):
                    return None
                cut.append((number, part))
        pieces.append((some, cut))
    return pieces


def _units(program: Program) -> tuple[int, int, int]:
    return program.unit_tokens, program.src_units, program.dst_units


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
    if len(pieces) == 1 and all(whole is group for whole, group, _ in pieces[0][1]):
        return [(pieces[0][0], plan)]
    held: dict[RunGroup, list[tuple[Part, Skips]]] = {}
    for part, skip in zip(plan.parts, plan.skips, strict=True):
        held.setdefault(part.group, []).append((part, skip))
    made = []
    for layers, cuts in pieces:
        moved: list[tuple[Part, Skips]] = []
        for whole, group, step in cuts:
            moved += [(Part(group, part.units + step), skip) for part, skip in held[whole]]
        made.append((layers, _narrowed(plan, moved)))
    return made


def _narrowed(plan: Plan, held: Sequence[tuple[Part, Skips]]) -> Plan:
    """Return a plan of only these parts, which are given with their skips. Its units and layouts stay the same."""
    parts, skips = tuple(part for part, _ in held), tuple(skip for _, skip in held)
    nbytes = sum(part.nbytes for part in parts)
    return Plan(parts, plan.units, nbytes, plan.direction, plan.layouts, plan.seams, skips, plan.programs)


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
    if len(plan.programs) != 1:
        return _cut(plan, groups, edges)
    known = _known.setdefault(plan.programs[0], {})
    pieces = known.get((edges, groups))
    if pieces is None:
        pieces = known[edges, groups] = _cut(plan, groups, edges)
    return pieces


def _cut(plan: Plan, groups: Sequence[RunGroup], edges: Edges) -> _Pieces:
    whole = [(frozenset(plan.layers), [Cut.between(group, group) for group in groups])]
    left, owners, of_axes = set(groups), [], []
    for program in plan.programs:
        mine = {(group.src, group.dst): group for group in program.program.groups if group in left}
        if mine:
            owners.append(program)
            of_axes.append(mine)
            left.difference_update(mine.values())
    pieces = None if left else cut_programs(owners, plan.layers, edges)
    if pieces is None:
        return whole
    made = []
    for layers, programs in pieces:
        cuts: list[Cut] = []
        for number, program in programs:
            for group in program.program.groups:
                full = of_axes[number].get((group.src, group.dst))
                if full is None:
                    return whole
                cuts.append(Cut.between(full, group))
        made.append((layers, cuts))
    return made
