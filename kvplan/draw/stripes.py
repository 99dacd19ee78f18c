"""Choose the runs of one unit that a picture of a program shows, and name the content of each."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

import numpy as np

from kvplan.layout.inverse import find
from kvplan.layout.kvlayout import KVLayout
from kvplan.layout.padding import stretches_of
from kvplan.layout.strides import Factors, Int64Array, extent, offset
from kvplan.program.matching import Pair, match
from kvplan.program.program import BlockAxis, Program

MOST = 16  # stripes; other runs are counted
# How many of the layers, parts, tokens, heads and pieces of a row are shown, the richest choice first.
CHOICES = (
    (3, 4, 3, 3, 3), (3, 4, 2, 2, 2), (2, 4, 2, 2, 2), (2, 4, 2, 2, 1), (2, 4, 2, 1, 1), (2, 2, 2, 1, 1),
    (2, 2, 1, 1, 1), (1, 2, 1, 1, 1),
)  # fmt: skip
AXES = ("layer", "part", "token", "head", "byte")


class Stripe(NamedTuple):
    """One run of a unit.

    Attributes:
        values: for each axis of :data:`AXES`, what the run holds of it, such as ``"0-15"``; "" if nothing is to say.
        parts: names of its parts.
        nbytes: bytes of the run.
        src, dst: address on each side, in unit 0 of block 0.
    """

    values: tuple[str, ...]
    parts: tuple[str, ...]
    nbytes: int
    src: int
    dst: int


class Left(NamedTuple):
    """Runs that are left out between two stripes: their number and bytes."""

    runs: int
    nbytes: int


class Side(NamedTuple):
    """One side of the picture, in order of address.

    Attributes:
        items: stripes, by their index, and runs that are left out; in separate allocations, a list for each. Runs that
            are left out between two allocations stand in a list of their own.
        touches: whether each item begins where the one before it ends.
        extents: number of extents, bytes of the smallest and of the largest.
        allocations: number of allocations that hold content of the unit.
    """

    items: tuple[tuple[int | Left, ...], ...]
    touches: frozenset[int]
    extents: tuple[int, int, int]
    allocations: int


class Stripes(NamedTuple):
    """The data of the picture: the stripes, both sides, and the numbers of all values of each axis."""

    stripes: tuple[Stripe, ...]
    sides: tuple[Side, Side]
    counts: tuple[int, ...]


def stripes_of(program: Program, src: KVLayout, dst: KVLayout) -> Stripes:
    """Choose stripes of the first unit, and place them on both sides."""
    runs = _runs(program)
    pairs = match(src.geometry, dst.geometry)
    chosen = _chosen(program, pairs, runs)
    stripes = tuple(_stripe(pairs, src, *(int(row[k]) for row in runs)) for k in chosen)
    sides = [_side(layout, runs[k], runs[2], chosen, program.extents(("src", "dst")[k]))
             for k, layout in enumerate((src, dst))]  # fmt: skip
    first = pairs[0]
    counts = (len({pair.layer for pair in pairs}), len({pair.part for pair in pairs}), program.unit_tokens,
              max(len(pair.heads) for pair in pairs), first.nbytes)  # fmt: skip
    return Stripes(stripes, (sides[0], sides[1]), counts)


def _runs(program: Program) -> Int64Array:
    """Return source address, destination address and bytes of every run of unit 0 of block 0, as (3, n)."""
    made = []
    for group in program.groups:
        rows = group.packed.copy()
        rows[0] += group.src_base + _first(group.src)
        rows[1] += group.dst_base + _first(group.dst)
        made.append(rows)
    return np.concatenate(made, axis=1)


def _first(axis: BlockAxis) -> int:
    return (axis.table[0] if axis.table is not None else 0) + axis.units[0]


def _pick(count: int, most: int) -> list[int]:
    """Return at most this many indices: the first ones, and the last.

    >>> _pick(80, 3), _pick(2, 3), _pick(16, 1)
    ([0, 1, 79], [0, 1], [0])
    """
    return list(range(count)) if count <= most else [*range(most - 1), count - 1] if most > 1 else [0]


def _chosen(program: Program, pairs: Sequence[Pair], runs: Int64Array) -> list[int]:
    """Return the indices of the runs to show."""
    if runs.shape[1] <= MOST:
        return list(range(runs.shape[1]))
    order = np.argsort(runs[0], kind="stable")
    starts = runs[0][order]
    layers = sorted({pair.layer for pair in pairs})
    parts = list(dict.fromkeys(pair.part for pair in pairs))
    held: dict[tuple[int, str], list[Pair]] = {}
    for pair in pairs:  # a pair for each head, if heads are separate allocations
        held.setdefault((pair.layer, pair.part), []).append(pair)
    found: list[int] = []
    for choice in CHOICES:
        some = [(layers[k], parts[j]) for k in _pick(len(layers), choice[0]) for j in _pick(len(parts), choice[1])]
        addresses = [
            address
            for key in some
            for pair in (held.get(key, [])[k] for k in _pick(len(held.get(key, ())), choice[3]))
            for address in _addresses(pair, program.unit_tokens, choice)
        ]  # fmt: skip
        at = np.searchsorted(starts, np.array(addresses, dtype=np.int64), "right") - 1
        found = sorted(set(order[at].tolist()))
        if len(found) <= MOST:
            break
    return found[:MOST]


def _addresses(pair: Pair, tokens: int, choice: tuple[int, ...]) -> Iterator[int]:
    """Yield source addresses of some tokens, heads and bytes of one pair."""
    form, component = pair.src.form, pair.src
    first = pair.heads.start - form.head_start if form.headed and pair.dst.form.headed else 0
    start = component.address + (form.table[0] if form.table is not None else 0)
    piece = max(pair.nbytes // max(_inner(pair.src.form.dim), _inner(pair.dst.form.dim), 1), 1)
    pieces = [0, pair.nbytes // piece, pair.nbytes - 1]
    bytes_shown = pieces[:1] if choice[4] == 1 else [pieces[0], pieces[2]] if choice[4] == 2 else pieces
    heads = _pick(len(pair.heads) if form.headed else extent(form.head), choice[3])
    for token, head, byte in product(_pick(tokens, choice[2]), heads, bytes_shown):
        yield (start + offset(form.token, token) + offset(form.head, first + head)
               + offset(form.dim, min(pair.src_dim + byte, extent(form.dim) - 1)))  # fmt: skip


def _inner(dim: Factors) -> int:
    """Return the number of contiguous bytes at the end of a row's axis."""
    return dim[-1][0] if len(dim) > 1 and dim[-1][1] == 1 else extent(dim)


# ---- names ---------------------------------------------------------------------------------------------------------


def _stripe(pairs: Sequence[Pair], src: KVLayout, start: int, dst: int, nbytes: int) -> Stripe:
    ends = [_content(pairs, src, address) for address in (start, start + nbytes - 1)]
    (a, *low), (b, *high) = ends
    if a is not b:  # the run goes on in another layer or part
        layers, parts = (a.layer, b.layer), tuple(dict.fromkeys((a.part, b.part)))
        values = (_span(*layers), " ".join(parts), "", "", "")
        return Stripe(values, parts, nbytes, start, dst)
    row = a.nbytes
    tokens, heads = (low[0], high[0]), (low[1], high[1])
    form = a.src.form
    whole_heads = (a.heads.start, a.heads.stop - 1) if form.headed else heads
    if nbytes > row and tokens[0] != tokens[1] and form.headed and heads != whole_heads and heads[0] != heads[1]:
        heads = whole_heads
    partly = nbytes < row or (low[2], high[2]) != (0, row - 1)
    values = (
        str(a.layer), a.part, "" if form.opaque else _span(*tokens), _span(*heads) if form.headed else "",
        _span(low[2], high[2]) if partly else "",
    )  # fmt: skip
    return Stripe(values, (a.part,), nbytes, start, dst)


def _content(pairs: Sequence[Pair], src: KVLayout, address: int) -> tuple[Pair, int, int, int]:
    """Return the pair, token, head and byte that lie at a source address."""
    found = find(src.components, address)
    if found is None:
        raise LookupError(f"no content at {address:#x}")
    component, (_, token, head, byte), _ = found
    for pair in pairs:
        if pair.src is component and pair.src_dim <= byte < pair.src_dim + pair.nbytes:
            return pair, token, component.form.head_start + head, byte - pair.src_dim
    raise LookupError(f"no pair holds byte {byte} of layer {component.layer} {component.part}")


def _span(low: int, high: int) -> str:
    low, high = min(low, high), max(low, high)
    return str(low) if low == high else f"{low}-{high}"


# ---- places --------------------------------------------------------------------------------------------------------


def _side(
    layout: KVLayout, starts: Int64Array, sizes: Int64Array, chosen: Sequence[int], extents: tuple[int, int, int]
) -> Side:
    """Place the chosen runs on one side, in order of address, and count the others."""
    order = np.argsort(starts, kind="stable")
    place = np.empty(len(order), dtype=np.int64)
    place[order] = np.arange(len(order))
    before = np.concatenate(([0], np.cumsum(sizes[order])))
    begins = [stretch.start for stretch in stretches_of(layout.regions)]
    lists: list[list[int | Left]] = []
    touches: set[int] = set()
    last, allocation = -1, -1
    for k in sorted(range(len(chosen)), key=lambda k: int(place[chosen[k]])):
        at = int(place[chosen[k]])
        here = bisect_right(begins, int(starts[chosen[k]])) - 1
        left = Left(at - last - 1, int(before[at] - before[last + 1]))
        if here != allocation and lists and left.runs:
            lists.append([left])
        elif left.runs and lists:
            lists[-1].append(left)
        if here != allocation:
            lists.append([left] if left.runs and not lists else [])
        lists[-1].append(k)
        if last >= 0 and not left.runs:
            previous = order[at - 1]
            if int(starts[previous] + sizes[previous]) == int(starts[chosen[k]]):
                touches.add(k)
        last, allocation = at, here
    if last < len(order) - 1:
        left = Left(len(order) - 1 - last, int(before[-1] - before[last + 1]))
        end = bisect_right(begins, int(starts[order[-1]])) - 1
        if end == allocation:
            lists[-1].append(left)
        else:
            lists.append([left])
    held = np.searchsorted(np.array(begins, dtype=np.int64), starts, "right")
    return Side(tuple(map(tuple, lists)), frozenset(touches), extents, len(np.unique(held)))
