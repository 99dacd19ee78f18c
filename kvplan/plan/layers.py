"""Split a plan by layers into several plans that move the same bytes, so that each layer arrives before the next."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from kvplan.layout.strides import Int64Array
from kvplan.plan.descriptors import Part
from kvplan.plan.plan import Plan, PlannedBy, narrowed
from kvplan.program.program import Program, RunGroup

Layers = frozenset[int]
Skips = tuple[int, int]
Edges = tuple[int, ...]
Cut = tuple[RunGroup, RunGroup]  # a run group of a plan, and the run group of some of its layers


def even_edges(layers: int, groups: int) -> Edges:
    """Return the edges of groups of about the same size: the number of layers before each group, and after the last.

    >>> even_edges(32, 4), even_edges(3, 8), even_edges(5, 0)
    ((0, 8, 16, 24, 32), (0, 1, 2, 3), (0, 5))
    """
    count = max(1, min(groups, layers))
    return tuple(layers * k // count for k in range(count + 1))


@dataclass(frozen=True, eq=False)
class LayerCuts:
    """The pieces that a plan of one part is cut into: one run group each. They serve every plan of the same program.

    Piece ``k`` moves ``groups[k]`` at the plan's units, shifted by ``steps[:, k]`` bytes.

    Attributes:
        layers: for each piece, the global numbers of its layers; pieces are in order of layers.
        groups: for each piece, its run group.
        steps: (2, pieces) int64: bytes from the source and destination address of a unit to the piece's addresses.
    """

    layers: tuple[Layers, ...]
    groups: tuple[RunGroup, ...]
    steps: Int64Array


# For each run group, its cuts; None if it cannot be cut so.
_known: weakref.WeakKeyDictionary[RunGroup, dict[Edges, LayerCuts | None]] = weakref.WeakKeyDictionary()


def cuts_of(plan: Plan, edges: Edges) -> LayerCuts | None:
    """Return how a plan is cut by layers, if it has one part and so has each piece.

    The cuts are kept with the part's run group, so the next plan of the program finds them in a microsecond.

    Args:
        plan: the plan to cut.
        edges: number of layers before each piece, and after the last.

    Returns:
        The cuts; None if the plan is not cut, or has several parts or programs, or a piece has several run groups.

    >>> import kvplan
    >>> gpu = kvplan.KVLayout.from_tensors("layer block token dim", np.zeros((4, 8, 16, 64), np.int8))
    >>> host = kvplan.KVLayout.from_tensors("block layer token dim", np.zeros((8, 4, 16, 64), np.int8))
    >>> cuts = cuts_of(kvplan.compile(gpu, host).plan([1, 2], [3, 4]), (0, 2, 4))
    >>> [sorted(layers) for layers in cuts.layers], cuts.steps.tolist()
    ([[0, 1], [2, 3]], [[0, 16384], [0, 2048]])
    """
    if len(plan.parts) != 1 or len(plan.programs) != 1:
        return None
    group = plan.parts[0].group
    known = _known.get(group)
    if known is None:
        known = _known.setdefault(group, {})
    if edges not in known:
        known[edges] = _cut(plan, edges)
    return known[edges]


def _cut(plan: Plan, edges: Edges) -> LayerCuts | None:
    whole, pieces = plan.parts[0].group, cut_groups(plan, edges)
    # A plan that is not cut keeps its own run group, which its cuts must not keep alive.
    if len(pieces) == 1 or any(len(cuts) != 1 for _, cuts in pieces):
        return None
    groups = tuple(group for _, ((_, group),) in pieces)
    steps = [[g.src_base - whole.src_base for g in groups], [g.dst_base - whole.dst_base for g in groups]]
    return LayerCuts(tuple(layers for layers, _ in pieces), groups, np.array(steps, dtype=np.int64))


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
    cuts = cuts_of(plan, edges)
    if cuts is not None:
        units = np.add(plan.parts[0].units, cuts.steps.T[:, :, None], order="C")
        pieces = zip(cuts.layers, cuts.groups, units, strict=True)
        return [(layers, narrowed(plan, [(Part(group, some), plan.skips[0])])) for layers, group, some in pieces]
    held: dict[RunGroup, list[tuple[Part, Skips]]] = {}
    for part, skip in zip(plan.parts, plan.skips, strict=True):
        held.setdefault(part.group, []).append((part, skip))
    cut = cut_groups(plan, edges)
    if len(cut) == 1 and all(full is group for full, group in cut[0][1]):
        return [(cut[0][0], plan)]
    made = []
    for layers, groups in cut:
        moved: list[tuple[Part, Skips]] = []
        for full, group in groups:
            step = np.array([[group.src_base - full.src_base], [group.dst_base - full.dst_base]], dtype=np.int64)
            moved += [(Part(group, part.units + step), skip) for part, skip in held[full]]
        made.append((layers, narrowed(plan, moved)))
    return made


def cut_groups(plan: Plan, edges: Edges) -> list[tuple[Layers, list[Cut]]]:
    """Cut the run groups of a plan as :func:`split_layers` does, without looking at any unit.

    Returns:
        For each piece, the global numbers of its layers, and its run groups: each with the run group of the plan that
        it is a part of. If the plan cannot be split, the one piece has the run groups of the plan.
    """
    layers = plan.layers
    whole = [(frozenset(layers), [(group, group) for group in dict.fromkeys(part.group for part in plan.parts)])]
    owners = _owners(plan)
    if owners is None:
        return whole
    made = []
    for some in (frozenset(layers[a:b]) for a, b in pairwise(edges)):
        cuts: list[Cut] = []
        for program, mine in owners:
            wanted = tuple(layer for layer in program.src.layers if layer in some)
            if not wanted:
                continue
            found = _cuts(program.of_layers(wanted).program, program.program, mine)
            if found is None:
                return whole
            cuts += found
        made.append((some, cuts))
    return made


def _owners(plan: Plan) -> list[tuple[PlannedBy, list[RunGroup]]] | None:
    """Return each program of the plan with the run groups that it made; None if a run group belongs to no program."""
    left = {part.group for part in plan.parts}
    owners = []
    for program in plan.programs:
        mine = [group for group in program.program.groups if group in left]
        if mine:
            owners.append((program, mine))
            left.difference_update(mine)
    return None if left else owners


def _cuts(sliced: Program, whole: Program, mine: list[RunGroup]) -> list[Cut] | None:
    """Return the run groups of ``sliced``, each with the one of ``mine`` that it is cut from; None if units differ."""
    units = [(made.unit_tokens, made.src_units, made.dst_units) for made in (sliced, whole)]
    if units[0] != units[1]:
        return None
    by_axes = {(group.src, group.dst): group for group in mine}
    made = []
    for group in sliced.groups:
        full = by_axes.get((group.src, group.dst))
        if full is None:
            return None
        made.append((full, group))
    return made
