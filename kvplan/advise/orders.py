"""List the orders of axes that one side of a pair could have, as specs from which layouts are built."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import combinations, pairwise, permutations
from typing import Any, NamedTuple

from kvplan.advise.compare import evenly_layered
from kvplan.layout.dtypes import ITEMSIZE
from kvplan.layout.kvlayout import KVLayout
from kvplan.layout.strides import Factors, extent

MOST_BLOCK_TOKENS = 1024
MOST_LAYERS_WHOLE = 8  # all unequal layers are compiled; if there are more than this, fewer block sizes are tried


class Content(NamedTuple):
    """One or two parts of the same shape.

    Attributes:
        part: the name in a spec; if ``kv``, it stands for two parts.
        kv: whether the parts are K and V.
        heads: global numbers of the heads; None if there is no head axis.
        opaque: whether blocks have no token slots.
        nbytes: bytes per (token, head).
    """

    part: str
    kv: bool
    heads: range | None
    opaque: bool
    nbytes: int


class Candidate(NamedTuple):
    """An order of axes that is not compiled yet.

    Attributes:
        dims: for each content, its dims, outermost first: name and extent (the extent of ``dim`` in bytes).
        block_tokens: token slots per block.
        distance: distance from the present order: number of swapped pairs of axes, and 2 for another block size.
    """

    dims: tuple[tuple[Content, tuple[tuple[str, int], ...]], ...]
    block_tokens: int
    distance: int


# ---- the orders ----------------------------------------------------------------------------------------------


def candidates(mine: KVLayout, other: KVLayout, *, refused: bool) -> Iterator[Candidate]:
    """Yield every order to try for one side.

    Args:
        mine: the side that may change.
        other: the side that does not change.
        refused: whether the pair cannot be compiled as it is.
    """
    sizes, present = _block_sizes(mine, other), _storage_order(mine)
    for held in _contents(mine, other, refused=refused):
        for tokens in sizes if any(not content.opaque for content in held) else (1,):
            for order in _orders(held, mine, tokens):
                distance = _distance(present, order) + 2 * (tokens != mine.block_tokens)
                yield Candidate(tuple((one, _dims(one, order, tokens)) for one in held), tokens, distance)
    apart = len(other.components) > len(other.layers) * len(other.parts)  # heads in allocations of their own
    if other.layers == mine.layers and other.heads == mine.heads and _split(other) and not apart:
        for outer in (("block", "layer"), ("layer", "block")):
            dims = tuple(_mirrored(other, outer))
            yield Candidate(dims, other.block_tokens, 8)


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
    own, theirs = _content(mine), _content(other)
    if own:
        yield own
    same = _row_nbytes(mine) == _row_nbytes(other) and mine.layers == other.layers
    if theirs and theirs != own and same and (refused or mine.heads == other.heads):
        yield theirs


def _row_nbytes(layout: KVLayout) -> Fraction:
    return Fraction(layout.block_nbytes, layout.block_tokens)


def _content(layout: KVLayout) -> tuple[Content, ...]:
    """Return the contents of a layout; () if a part differs between layers, because one order cannot hold that."""
    shapes: dict[str, Content] = {}
    for c in layout.components:
        form = c.form
        one = Content(c.part, False, form.heads if form.headed else None, form.opaque, extent(form.dim))  # noqa: FBT003
        if shapes.setdefault(c.part, one) != one:
            return ()
    if len(layout.components) != len(shapes) * len(layout.layers):
        return ()
    found: list[Content] = []
    for part, one in shapes.items():
        half = part.partition("_")
        other = f"{'v' if half[0] == 'k' else 'k'}{half[1]}{half[2]}"
        if half[0] in ("k", "v") and other in shapes and shapes[other]._replace(part=part) == one:
            if half[0] == "k":
                found.append(one._replace(part=half[2] or "kv", kv=True))
        else:
            found.append(one)
    return tuple(found)


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


# ---- the other side's own order ------------------------------------------------------------------------------


def _split(layout: KVLayout) -> bool:
    return any(len(factors) > 1 for c in layout.components for factors in (c.form.token, c.form.head, c.form.dim))


def _mirrored(other: KVLayout, outer: Sequence[str]) -> Iterator[tuple[Content, tuple[tuple[str, int], ...]]]:
    """Yield the dims of each part in the other side's order inside a block; K and V together if they are equal."""
    forms = {c.part: c.form for c in reversed(other.components)}
    joined = set(forms) == {"k", "v"} and forms["k"] == forms["v"]
    for part in ("kv",) if joined else other.parts:
        form = forms["k" if joined else part]
        one = Content(part, joined, form.heads if form.headed else None, form.opaque, extent(form.dim))
        atoms: list[tuple[int, str, int]] = []
        slots = "subblock" if form.opaque else "token"
        for axis, factors in ((slots, form.token), ("head", form.head), ("dim", form.dim)):
            atoms += [(stride, _atom(axis, k, factors), size) for k, (size, stride) in enumerate(factors)]
        named = {name.partition(".")[0] for _, name, _ in atoms}
        needed = (("token", not form.opaque), ("head", form.headed), ("dim", True))
        still = [(axis, 1) for axis, there in needed if there and axis not in named]
        inner = [(name, size) for _, name, size in sorted(atoms, key=lambda atom: -atom[0])]
        yield one, (*((axis, 1) for axis in outer), *((("kv", 2),) if joined else ()), *still, *inner)


def _atom(axis: str, number: int, factors: Factors) -> str:
    return axis if len(factors) == 1 else f"{axis}.{number}"


# ---- specs ---------------------------------------------------------------------------------------------------


def notation_of(candidate: Candidate) -> str:
    """Return the notation of a candidate; if contents have different notations, all notations."""
    return " + ".join(dict.fromkeys(" ".join(name for name, _ in dims) for _, dims in candidate.dims))


def spec_of(candidate: Candidate, mine: KVLayout, layers: Sequence[int]) -> dict[str, Any]:
    """Return the spec of a candidate that holds these layers."""
    blocks = max(mine.num_blocks * mine.block_tokens // candidate.block_tokens, 1)
    specs = [_one_spec(one, dims, mine, blocks, layers) for one, dims in candidate.dims]
    return specs[0] if len(specs) == 1 else {"layouts": specs}


def _one_spec(
    one: Content, dims: Sequence[tuple[str, int]], mine: KVLayout, blocks: int, layers: Sequence[int]
) -> dict[str, Any]:
    sizes = dict(dims)
    sizes |= {"layer": len(layers), "block": blocks}
    innermost = [name for name, _ in dims if name.partition(".")[0] == "dim"][-1]
    itemsize = ITEMSIZE.get(mine.dtype, 0)
    whole = itemsize > 0 and sizes[innermost] % itemsize == 0 and dims[-1][0] == innermost
    sizes[innermost] //= itemsize if whole else 1
    spec: dict[str, Any] = {
        "notation": " ".join(name for name, _ in dims),
        "dtype": mine.dtype if whole else "uint8",
        "device": mine.device,
        "sizes": sizes,
        "part": one.part,
        "layers": list(layers),
    }
    return spec | ({"head_start": one.heads.start} if one.heads is not None else {})
