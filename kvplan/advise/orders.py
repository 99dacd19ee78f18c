"""List the orders of axes that one side of a pair could have."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import combinations, pairwise, permutations

from kvplan.advise.compare import evenly_layered
from kvplan.advise.contents import Candidate, Content, contents_of
from kvplan.advise.mirrored import mirrored
from kvplan.advise.page_orders import pages
from kvplan.layout.kvlayout import KVLayout

MOST_BLOCK_TOKENS = 1024
MOST_LAYERS_WHOLE = 8  # all unequal layers are compiled; if there are more than this, fewer block sizes are tried


# ---- the orders ----------------------------------------------------------------------------------------------


def candidates(mine: KVLayout, other: KVLayout, *, refused: bool, sizes: tuple[int, ...] = ()) -> Iterator[Candidate]:
    """Yield every order to try for one side.

    Args:
        mine: the side that may change.
        other: the side that does not change.
        refused: whether the pair cannot be compiled as it is.
        sizes: token slots per block to try; by default those of both sides, and some halves and multiples.
    """
    sizes, present = sizes or _block_sizes(mine, other), _storage_order(mine)
    known = set()
    for held in _contents(mine, other, refused=refused):
        for tokens in sizes if any(not content.opaque for content in held) else (1,):
            for order in _orders(held, mine, tokens):
                distance = _distance(present, order) + 2 * (tokens != mine.block_tokens)
                made = Candidate(tuple((one, _dims(one, order, tokens)) for one in held), tokens, distance)
                known.add(made.dims)
                yield made
    for tokens in sizes:
        yield from (one for one in mirrored(mine, other, tokens) if one.dims not in known)
        yield from pages(mine, other, tokens)


def _block_sizes(mine: KVLayout, other: KVLayout) -> tuple[int, ...]:
    """Return the block sizes to try, in token slots: of this side, of the other side, and some halves and multiples."""
    if mine.opaque and other.opaque:
        return (1,)
    own = other.block_tokens if mine.opaque else mine.block_tokens
    if _split(other) or (len(other.layers) > MOST_LAYERS_WHOLE and not evenly_layered(other)):
        return tuple(sorted({own, other.block_tokens}))
    sizes = {own, own * 2, other.block_tokens, other.block_tokens * 2, other.block_tokens * 4}
    sizes |= {own // 2} if own % 2 == 0 else set()
    return tuple(sorted(size for size in sizes if size <= max(MOST_BLOCK_TOKENS, own)))


def _contents(mine: KVLayout, other: KVLayout, *, refused: bool) -> Iterator[tuple[Content, ...]]:
    """Yield the contents to try: the side's own parts, and the other side's parts if the bytes are the same."""
    own, theirs = contents_of(mine), contents_of(other)
    if own:
        yield own
    same = _row_nbytes(mine) == _row_nbytes(other) and mine.layers == other.layers
    if theirs and theirs != own and same and (refused or mine.heads == other.heads):
        yield theirs


def _row_nbytes(layout: KVLayout) -> Fraction:
    return Fraction(layout.block_nbytes, layout.block_tokens)


def _orders(held: Sequence[Content], mine: KVLayout, tokens: int) -> Iterator[tuple[str, ...]]:
    """Yield the permutations of the axes with an extent above 1; axes of extent 1 keep their usual place."""
    extents = {
        "block": 2,
        "layer": len(mine.layers),
        "kv": 2 if any(one.kv for one in held) else 1,
        "token": 1 if all(one.opaque for one in held) else tokens,
        "head": max(len(one.heads) if one.heads is not None else 1 for one in held),
    }
    free = [axis for axis, size in extents.items() if size > 1]
    still = tuple(axis for axis, size in extents.items() if size == 1)
    for order in permutations(free):
        if "token" not in order or order.index("block") < order.index("token"):
            at = order.index("block") + 1 if "layer" in still else 0
            yield (*order[:at], *(("layer",) if at else ()), *order[at:], *(axis for axis in still if axis != "layer"))


def _dims(one: Content, order: Sequence[str], tokens: int) -> tuple[tuple[str, int], ...]:
    extents = {"token": 0 if one.opaque else tokens, "head": 0 if one.heads is None else len(one.heads),
               "kv": 2 if one.kv else 0, "layer": 1, "block": 1}  # fmt: skip
    return (*((axis, extents[axis]) for axis in order if extents[axis]), ("dim", one.nbytes))


def _storage_order(layout: KVLayout) -> tuple[str, ...]:
    """Return the axes of a layout in order of memory, the largest stride first."""
    form = layout.components[0].form
    lines: dict[str, list[int]] = {"layer": [], "kv": []}
    first = layout.components[0]
    for c in layout.components:
        if c.part == first.part:
            lines["layer"].append(c.address)
        if c.layer == first.layer:
            lines["kv"].append(c.address)
    strides = {axis: max((stride for _, stride in factors), default=0)
               for axis, factors in (("block", form.block), ("token", form.token), ("head", form.head))}  # fmt: skip
    if form.table is not None:
        strides["block"] = 1 << 62
    for axis, line in lines.items():
        strides[axis] = min((abs(b - a) for a, b in pairwise(line)), default=0)
    return tuple(sorted(strides, key=lambda axis: -strides[axis]))


def _distance(present: Sequence[str], order: Sequence[str]) -> int:
    """Count the pairs of axes that two orders have in opposite order."""
    return sum(order.index(a) > order.index(b) for a, b in combinations(present, 2))


def _split(layout: KVLayout) -> bool:
    return any(len(factors) > 1 for c in layout.components for factors in (c.form.token, c.form.head, c.form.dim))
