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
Held = dict[RunGroup, list[tuple[Part, Skips]]]


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


# For each run group, its cuts by number of pieces; None if it cannot be cut so.
_known: weakref.WeakKeyDictionary[RunGroup, dict[int, LayerCuts | None]] = weakref.WeakKeyDictionary()


def cuts_of(plan: Plan, count: int) -> LayerCuts | None:
    """Return how a plan is cut into at most ``count`` pieces, if it has one part and so has each piece.

    The cuts are kept with the part's run group, so the next plan of the program finds them in a microsecond.

    Args:
        plan: the plan to cut.
        count: maximum number of pieces.

    Returns:
        The cuts; None if the plan is not cut, or has several parts or programs, or a piece has several run groups.

    >>> import kvplan
    >>> gpu = kvplan.KVLayout.from_tensors("layer block token dim", np.zeros((4, 8, 16, 64), np.int8))
    >>> host = kvplan.KVLayout.from_tensors("block layer token dim", np.zeros((8, 4, 16, 64), np.int8))
    >>> cuts = cuts_of(kvplan.compile(gpu, host).plan([1, 2], [3, 4]), 2)
    >>> [sorted(layers) for layers in cuts.layers], cuts.steps.tolist()
    ([[0, 1], [2, 3]], [[0, 16384], [0, 2048]])
    """
    if len(plan.parts) != 1 or len(plan.programs) != 1:
        return None
    group = plan.parts[0].group
    known = _known.get(group)
    if known is None:
        known = _known.setdefault(group, {})
    if count not in known:
        known[count] = _cuts(plan, count)
    return known[count]


def _cuts(plan: Plan, count: int) -> LayerCuts | None:
    pieces = _split(plan, count)
    # A plan that is not cut keeps its own run group, which its cuts must not keep alive.
    if len(pieces) == 1 or any(len(piece.parts) != 1 for _, piece in pieces):
        return None
    whole, groups = plan.parts[0].group, tuple(piece.parts[0].group for _, piece in pieces)
    steps = [[g.src_base - whole.src_base for g in groups], [g.dst_base - whole.dst_base for g in groups]]
    return LayerCuts(tuple(layers for layers, _ in pieces), groups, np.array(steps, dtype=np.int64))


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
    cuts = cuts_of(plan, count)
    if cuts is None:
        return _split(plan, count)
    units = plan.parts[0].units + cuts.steps.T[:, :, None]
    pieces = zip(cuts.layers, cuts.groups, units, strict=True)
    return [(layers, narrowed(plan, [(Part(group, some), plan.skips[0])])) for layers, group, some in pieces]


def _split(plan: Plan, count: int) -> list[tuple[Layers, Plan]]:
    """Do as :func:`split_layers`, for any plan, with a look at every part of its programs."""
    layers = plan.layers
    count = min(count, len(layers))
    owners = _owners(plan) if count > 1 else None
    if owners is None:
        return [(frozenset(layers), plan)]
    edges = [len(layers) * k // count for k in range(count + 1)]
    made = []
    for some in (layers[a:b] for a, b in pairwise(edges)):
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
