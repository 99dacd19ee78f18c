"""The picture of a program: some runs of one unit, each named, between source and destination."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby, product
from typing import Any, NamedTuple

import numpy as np

from kvplan.base.numbers import count_of
from kvplan.draw import bands
from kvplan.draw.bands import Band, Label, Line, Picture, Ribbon, Row
from kvplan.layout.address_ranges import stretches_of
from kvplan.layout.components import Component
from kvplan.layout.places import find
from kvplan.layout.strides import Int64Array
from kvplan.program.explain import run_times
from kvplan.program.matching import Pair, match
from kvplan.program.program import Program, RunGroup

MOST = 12  # runs that are drawn; others are counted
AXES = ("layer", "part", "token", "head", "byte")
GAP = 72  # pixels between both sides


class Place(NamedTuple):
    """The coordinates of one byte: layer and head by their global numbers, part, block, token slot, byte of the row.

    In an opaque part, the token slot is the sub-block's number.
    """

    layer: int
    part: str
    block: int
    token: int
    head: int
    byte: int


def locate_byte(
    components: Sequence[Component], pairs: Sequence[Pair], side: str, address: int
) -> tuple[Place, Pair | None]:
    """Return the content at an address of the source or the destination, and the pair that moves it.

    A row of fused K and V holds two parts, if the other side keeps them apart.
    """
    content = find(components, address)
    if content is None:
        raise LookupError(f"no content at {address:#x}")  # never: every byte of a run is content on both sides
    component, (block, token, head, byte) = content
    head += component.form.head_start
    for pair in pairs:
        first = pair.src_dim if side == "src" else pair.dst_dim
        if (pair.src if side == "src" else pair.dst) is component and first <= byte < first + pair.nbytes:
            return Place(component.layer, pair.part, block, token, head, byte - first), pair
    return Place(component.layer, component.part, block, token, head, byte), None


def program_picture(program: Program, src: Any, dst: Any, title: str) -> Picture:
    """Return the runs of one unit as a picture: the source above, the destination below.

    Of many runs, the first and the last of each loop are drawn, and the others are counted. A frame is one allocation.

    Args:
        program: the program.
        src, dst: the layouts.
        title: the title of the picture, for who cannot see it.
    """
    begins = [np.array([*_begins(group), 0], dtype=np.int64)[:, None] for group in program.groups]
    runs = np.concatenate([group.packed + at for group, at in zip(program.groups, begins, strict=True)], axis=1)
    runs = runs[:, np.argsort(runs[0], kind="stable")]
    pairs = match(src.geometry, dst.geometry)
    chosen = _chosen(program, runs[0])
    stripes = [_stripe(src.components, pairs, *runs[:, k].tolist()) for k in chosen]
    counts = (len({pair.layer for pair in pairs}), len({pair.part for pair in pairs}), program.unit_tokens,
              max(len(pair.heads) for pair in pairs), max(pair.nbytes for pair in pairs))  # fmt: skip
    axes = [f"{axis} of {count:,}" for axis, count in zip(AXES, counts, strict=True)]
    lower, below = _side("destination", dst, runs[1:], chosen, stripes, axes, program.extents("dst"))
    upper, above = _side("source", src, runs[::2], chosen, stripes, axes, program.extents("src"))
    fills = [band.parts[0] for _, band in stripes]
    ribbons = tuple(Ribbon(a, b, b, fill) for a, b, fill in zip(upper, lower, fills, strict=True))
    left_out = f"; {len(chosen)} drawn, {program.runs - len(chosen):,} left out" * (len(chosen) < program.runs)
    headline = f"{run_times(program.runs, *program.run_nbytes)} a unit{left_out}"
    parts = tuple(dict.fromkeys(part for _, band in stripes for part in band.parts))
    legend = (*parts, *((bands.LEFT_OUT,) if left_out else ()), bands.ALLOCATION)
    rows = (replace(above, above=True, ribbons=ribbons), below)
    return Picture(title, "", (headline, f"from {src}", f"to {dst}"), bands.part_fills(parts), legend, rows, GAP)


def _begins(group: RunGroup) -> list[int]:
    """Return the addresses of unit 0 of block 0 on both sides."""
    axes = ((group.src, group.src_base), (group.dst, group.dst_base))
    return [base + axis.units[0] + (0 if axis.table is None else axis.table[0]) for axis, base in axes]


def _pick(items: Sequence[Any], most: int) -> list[Any]:
    """Return as many of the first items as of the last ones, at most this many in all.

    >>> _pick(range(80), 3), _pick(range(2), 3), _pick(range(16), 1)
    ([0, 1, 79], [0, 1], [0])
    """
    last = min(most // 2, max(len(items) - (most + 1) // 2, 0))
    return [*items[: (most + 1) // 2], *items[len(items) - last :]]


def _chosen(program: Program, starts: Int64Array) -> list[int]:
    """Return the indices of the runs to draw: the corners of all loops, as many as there is room for."""
    chosen = np.empty(0, dtype=np.int64)
    for most in range(MOST, 0, -1):
        corners = [
            _begins(group)[0] + run.src + sum(step * loop[1] for step, loop in zip(steps, run.loops, strict=True))
            for group in program.groups
            for run in _pick(group.runs, most)
            for steps in product(*(_pick(range(loop[0]), most) for loop in run.loops))
        ]
        chosen = np.unique(np.searchsorted(starts, np.array(corners, dtype=np.int64), "right") - 1)
        if chosen.size <= MOST:
            break
    return [int(k) for k in chosen[:MOST]]


def _stripe(
    components: Sequence[Component], pairs: Sequence[Pair], src: int, dst: int, nbytes: int
) -> tuple[tuple[str, ...], Band]:
    """Return what a run holds of each axis, "" if nothing is to say, and its band."""
    values, parts = _coordinates(components, pairs, src, nbytes)
    cells = tuple(Band("", 1, part, 1) for part in parts) if len(parts) > 1 else ()
    title = f"{_words(values)}: {nbytes:,} bytes from {src:#x} to {dst:#x}"
    return values, Band("", nbytes, bands.MIXED if cells else parts[0], nbytes, cells, title=title)


def run_words(components: Sequence[Component], pairs: Sequence[Pair], address: int, nbytes: int) -> str:
    """Return the coordinates of a run in words, from its address in the source."""
    return _words(_coordinates(components, pairs, address, nbytes)[0])


def _words(values: Sequence[str]) -> str:
    return ", ".join(f"{axis} {value}" for axis, value in zip(AXES, values, strict=True) if value)


def _coordinates(
    components: Sequence[Component], pairs: Sequence[Pair], src: int, nbytes: int
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return what a run holds of each axis, "" if nothing is to say, and its parts."""
    (low, pair), (high, other) = (locate_byte(components, pairs, "src", at) for at in (src, src + nbytes - 1))
    parts = tuple(dict.fromkeys((low.part, high.part)))
    values = [_span(low.layer, high.layer), " ".join(parts), "", "", ""]
    if pair is other and pair is not None:  # otherwise the run goes on in another layer or part
        form, partly = pair.src.form, (low.byte, high.byte) != (0, pair.nbytes - 1)
        values[2:] = ["" if form.opaque else _span(low.token, high.token), _span(low.head, high.head) * form.headed,
                      _span(low.byte, high.byte) * partly]  # fmt: skip
    return tuple(values), parts


def _span(low: int, high: int) -> str:
    return str(low) if low == high else f"{min(low, high)}-{max(low, high)}"


def _side(
    side: str, layout: Any, runs: Int64Array, chosen: Sequence[int], stripes: Sequence[tuple[tuple[str, ...], Band]],
    axes: Sequence[str], extents: tuple[int, int, int],
) -> tuple[list[int], Row]:  # fmt: skip
    """Return the index of each stripe in the row of one side, and the row, in order of address."""
    order = np.argsort(runs[0], kind="stable")
    starts, sizes = runs[:, order]
    begins = [stretch.start for stretch in stretches_of(layout.regions)]
    memory = np.searchsorted(np.array(begins, dtype=np.int64), starts, "right").tolist()  # number of the allocation
    places = sorted((at, n) for n, at in enumerate(np.argsort(order)[list(chosen)].tolist()))
    items: list[tuple[int | None, Band, bool]] = []
    at_item: dict[int, int] = {}
    last = -1
    for at, n in (*places, (order.size, -1)):
        if count := at - last - 1:
            nbytes = int(sizes[last + 1 : at].sum())
            title = f"{count_of(count, 'run')} of {nbytes:,} bytes, left out"
            around = {memory[k] for k in (last, at) if 0 <= k < order.size}
            left_out = Band(f"+{count:,}", 1, bands.LEFT_OUT, nbytes, pale=True, title=title)
            items.append((around.pop() if len(around) == 1 else None, left_out, False))
        if n >= 0:
            touching = not count and at > 0 and bool(starts[at - 1] + sizes[at - 1] == starts[at])
            at_item[n] = len(items)
            items.append((memory[at], stripes[n][1], touching))
        last = at
    index, row = bands.spaced(items)
    columns = [index[at_item[n]] for n in range(len(chosen))]
    named = (_line(axis, [(columns[n], stripes[n][0][k]) for _, n in places]) for k, axis in enumerate(axes))
    lines = sorted((line for line in named if line.labels), key=lambda line: len(line.labels))
    spread = f"{'contiguous' if extents[0] == 1 else 'apart'}, in {count_of(len(set(memory)), 'allocation')}"
    whole = Label(0, len(row.cells) - 1, f"{run_times(*extents)}, {spread}")
    lines.insert(0, Line((whole,), side))
    return columns, replace(row, forms=(tuple(lines if side == "source" else reversed(lines)),))


def _line(axis: str, values: Sequence[tuple[int, str]]) -> Line:
    """Return the labels of an axis; neighbours of one value share one."""
    groups = [list(some) for _, some in groupby(values, key=lambda each: each[1])]
    return Line(tuple(Label(some[0][0], some[-1][0], some[0][1]) for some in groups if some[0][1]), axis)
