"""Split a plan by layers into several plans that move the same bytes, so that each layer arrives before the next."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from kvplan.plan.descriptors import Part
from kvplan.plan.plan import Plan, PlannedBy, narrowed
from kvplan.program.program import Program, RunGroup

Layers = frozenset[int]
Skips = tuple[int, int]
Cut = tuple[RunGroup, RunGroup]  # a run group of a plan, and the run group of some of its layers


def layers_of(plan: Plan) -> tuple[int, ...]:
    """Return the global numbers of the layers that a plan moves, in ascending order."""
    return tuple(sorted({layer for src, _ in plan.layouts for layer in src.layers}))


def split_layers(plan: Plan, count: int) -> list[tuple[Layers, Plan]]:
    """Split a plan into at most ``count`` plans of consecutive layers, in order of layers.

    If a program of fewer layers would have units of another size than the plan's, the plan is not split.

    Args:
        plan: the plan to split.
        count: maximum number of plans.

    Returns:
        For each plan, the global numbers of its layers, and the plan.

    >>> import kvplan
    >>> gpu = kvplan.KVLayout.from_tensors("layer block token dim", np.zeros((4, 8, 16, 64), np.int8))
    >>> host = kvplan.KVLayout.from_tensors("block layer token dim", np.zeros((8, 4, 16, 64), np.int8))
    >>> plan = kvplan.compile(gpu, host).plan([1, 2], [3, 4])
    >>> [(sorted(layers), part) for layers, part in split_layers(plan, 2)]
    [([0, 1], Plan(host of 2 units, 4096 bytes)), ([2, 3], Plan(host of 2 units, 4096 bytes))]
    """
    held: dict[RunGroup, list[tuple[Part, Skips]]] = {}
    for part, skip in zip(plan.parts, plan.skips, strict=True):
        held.setdefault(part.group, []).append((part, skip))
    cut = cut_groups(plan, count)
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


def cut_groups(plan: Plan, count: int) -> list[tuple[Layers, list[Cut]]]:
    """Cut the run groups of a plan as :func:`split_layers` does, without looking at any unit.

    Returns:
        For each piece, the global numbers of its layers, and its run groups: each with the run group of the plan that
        it is a part of. If the plan cannot be split, the one piece has the run groups of the plan.
    """
    layers = layers_of(plan)
    count = max(1, min(count, len(layers)))
    edges = [len(layers) * k // count for k in range(count + 1)]
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
            found = _cuts(program.of_layers(wanted), program.program, mine)
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
