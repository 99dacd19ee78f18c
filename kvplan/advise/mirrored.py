"""List the orders that repeat, inside a block, the other side's order, with tokens and heads split where needed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import gcd
from typing import NamedTuple

from kvplan.advise.contents import Candidate, Content, contents_of, parts_held
from kvplan.layout.components import Component, Form
from kvplan.layout.kvlayout import KVLayout
from kvplan.layout.strides import cut

SPLIT = 8  # the distance of an order with split axes: any order without them is closer to the present one
Atom = tuple[int, str, int]  # stride in bytes, axis, extent
Dims = tuple[tuple[str, int], ...]
EXTENTS = {"layer": 1, "kv": 2}  # the extent of layer is filled in when the spec is made
# How the outermost axes may stand. An axis that the content lacks is left out.
OUTER = (("block", "layer", "kv"), ("layer", "block", "kv"), ("block", "kv", "layer"), ("kv", "block", "layer"))


class Held(NamedTuple):
    """A content, the first component of its first layer, and its strides from layer to layer and from K to V."""

    content: Content
    first: Component
    layer_stride: int
    kv_stride: int


def mirrored(mine: KVLayout, other: KVLayout, tokens: int) -> Iterator[Candidate]:
    """Yield the orders whose units lie in a block as they lie in a block of the other side.

    A unit is the most tokens that divide both blocks. Tokens of a block that holds several units are split into units
    and tokens of a unit. Heads are split if the side that changes holds the heads of several ranks.

    Args:
        mine: the side that may change.
        other: the side that does not change.
        tokens: token slots per block of the orders; ignored if all content is opaque.
    """
    held = tuple(held_of(mine, other))
    units = outer_extents(mine, other, tokens, held)
    if not held or units is None:
        return
    block_tokens = other.block_tokens if all(one.content.opaque for one in held) else tokens
    unit = gcd(tokens, other.block_tokens)
    known = set()
    for distance, outer in enumerate(OUTER, SPLIT):
        for deep in (True, False):
            made = tuple((one.content, dims_of(one, unit, outer, units, deep=deep)) for one in held)
            if all(dims for _, dims in made) and made not in known:
                known.add(made)
                yield Candidate(made, block_tokens, distance)


def held_of(mine: KVLayout, other: KVLayout) -> Iterator[Held]:
    """Yield the contents of the other side; K and V are one content if they have one form, otherwise two."""
    if len(other.components) > len(other.layers) * len(other.parts) or not set(other.layers) <= set(mine.layers):
        return  # heads in allocations of their own, or layers that this side lacks
    lines: dict[str, list[Component]] = {}
    for component in other.components:
        lines.setdefault(component.part, []).append(component)
    for content in contents_of(other):
        parts = parts_held(content)
        heads = mine.heads if content.heads is not None else None
        firsts = [lines[part][0] for part in parts]
        if len(parts) == 2 and firsts[0].form == firsts[1].form:
            yield Held(content._replace(heads=heads), firsts[0], _step(lines[parts[0]]), _step(firsts))
            continue
        for part, first in zip(parts, firsts, strict=True):
            yield Held(content._replace(part=part, kv=False, heads=heads), first, _step(lines[part]), 0)


def _step(line: Sequence[Component]) -> int:
    """Return the least distance between neighbours in bytes; 0 for one component."""
    return min((abs(b.address - a.address) for a, b in pairwise(line)), default=0)


def outer_extents(mine: KVLayout, other: KVLayout, tokens: int, held: Sequence[Held]) -> dict[str, int] | None:
    """Return the units per block and the ranks' shares of the heads; None if the other side's heads are no share."""
    extents = {}
    if any(not one.content.opaque for one in held):
        extents["token"] = tokens // gcd(tokens, other.block_tokens)
    if any(one.content.heads is not None for one in held) and mine.heads != other.heads:
        share = len(other.heads)
        inside = mine.heads.start <= other.heads.start and other.heads.stop <= mine.heads.stop
        if not inside or len(mine.heads) % share or (other.heads.start - mine.heads.start) % share:
            return None
        extents["head"] = len(mine.heads) // share
    return extents


def dims_of(one: Held, unit: int, outer: Sequence[str], units: dict[str, int], *, deep: bool) -> Dims:
    """Return the dims of a content, outermost first; () if factors cannot express the tokens of a unit.

    Args:
        one: the content.
        unit: tokens per unit.
        outer: the order of block, layer and K/V.
        units: units per block, and shares of the heads.
        deep: whether layers and K/V lie inside tokens and heads if they do so on the other side.
    """
    content = one.content
    inner = atoms_of(one.first.form, unit)
    deepest = max((stride for stride, _, _ in inner), default=0) if deep else 0
    begin: list[tuple[str, int]] = []
    for axis in outer:
        stride = {"layer": one.layer_stride, "kv": one.kv_stride}.get(axis, 0)
        if axis == "block":
            begin += [("block", 1), *units_of(content, units)]
        elif axis == "kv" and not content.kv:
            continue
        elif 0 < stride < deepest:
            inner.append((stride, axis, EXTENTS[axis]))
        else:
            begin.append((axis, EXTENTS[axis]))
    ordered = [(axis, size) for _, axis, size in sorted(inner, key=lambda atom: -atom[0])]
    named = {axis for axis, _ in (*begin, *ordered)}
    needed = (("token", not content.opaque), ("head", content.heads is not None), ("dim", True))
    still = [(axis, 1) for axis, there in needed if there and axis not in named]
    return _numbered([*begin, *still, *ordered]) if inner else ()


def units_of(content: Content, units: dict[str, int]) -> Iterator[tuple[str, int]]:
    """Yield the factors that stand directly behind ``block``: the units of a block, and the shares of the heads."""
    if not content.opaque and units["token"] > 1:
        yield "token", units["token"]
    if content.heads is not None and units.get("head", 1) > 1:
        yield "head", units["head"]


def atoms_of(form: Form, unit: int) -> list[Atom]:
    """Return the factors of one unit, each with its stride; [] if the tokens of a unit are no whole factors."""
    token = form.token
    if not form.opaque:
        found = cut(form.token, unit)
        if found is None:
            return []
        token = found[1]
    named = (("subblock" if form.opaque else "token", token), ("head", form.head), ("dim", form.dim))
    return [(stride, axis, size) for axis, factors in named for size, stride in factors if size > 1]


def _numbered(dims: Sequence[tuple[str, int]]) -> Dims:
    """Name the factors of a split axis.

    >>> _numbered([("block", 1), ("token", 4), ("layer", 1), ("token", 16), ("dim", 128)])
    (('block', 1), ('token.0', 4), ('layer', 1), ('token.1', 16), ('dim', 128))
    """
    counts = Counter(axis for axis, _ in dims)
    seen: Counter[str] = Counter()
    named = []
    for axis, size in dims:
        named.append((axis if counts[axis] == 1 else f"{axis}.{seen[axis]}", size))
        seen[axis] += 1
    return tuple(named)
