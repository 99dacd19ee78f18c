"""Split a plan by layers into several plans that move the same bytes, so that each layer arrives before the next."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from kvplan.plan.descriptors import Part
from kvplan.plan.plan import Plan, PlannedBy, narrowed
from kvplan.program.program import Program, RunGroup

Layers = frozenset[int]
Skips = tuple[int, int]
Held = dict[RunGroup, list[tuple[Part, Skips]]]


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
    layers = layers_of(plan)
    count = max(1, min(count, len(layers)))
    edges = [len(layers) * k // count for k in range(count + 1)]
    chosen = [layers[a:b] for a, b in pairwise(edges)]
    owners = _owners(plan)
    if owners is None:
        return [(frozenset(layers), plan)]
    made = []
    for some in chosen:
        moved: list[tuple[Part, Skips]] = []
        for program, held in owners:
            wanted = tuple(layer for layer in program.src.layers if layer in some)
            if not wanted:
                continue
            found = _parts(program.of_layers(wanted), program.program, held)
            if found is None:
                return [(frozenset(layers), plan)]
            moved += found
        made.append((frozenset(some), narrowed(plan, moved)))
    return made


def _owners(plan: Plan) -> list[tuple[PlannedBy, Held]] | None:
    """Return each program of the plan with the parts that it made; None if a part belongs to no program."""
    held: Held = {}
    for part, skip in zip(plan.parts, plan.skips, strict=True):
        held.setdefault(part.group, []).append((part, skip))
    owners = []
    for program in plan.programs:
        mine = {group: held.pop(group) for group in program.program.groups if group in held}
        if mine:
            owners.append((program, mine))
    return None if held else owners


def _parts(sliced: Program, whole: Program, held: Held) -> list[tuple[Part, Skips]] | None:
    """Return the parts of the whole program reduced to the run groups of ``sliced``; None if units differ in size."""
    units = [(made.unit_tokens, made.src_units, made.dst_units) for made in (sliced, whole)]
    if units[0] != units[1]:
        return None
    made = []
    by_axes = {(group.src, group.dst): group for group in held}
    for group in sliced.groups:
        full = by_axes.get((group.src, group.dst))
        if full is None:
            return None
        step = np.array([[group.src_base - full.src_base], [group.dst_base - full.dst_base]], dtype=np.int64)
        made += [(Part(group, part.units + step), skip) for part, skip in held[full]]
    return made
