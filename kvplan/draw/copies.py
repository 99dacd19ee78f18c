"""Pictures of copies: some runs of a program's unit, between the memory of both sides."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
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
from kvplan.program.program import Program

MOST = 12  # runs that are drawn; others are counted
AXES = ("layer", "part", "token", "head", "byte")
GAP = 72  # pixels between both sides of a program


class Item(NamedTuple):
    """A band of a row.

    Attributes:
        key: by which a ribbon finds it.
        owner: its allocation; None of what lies between two.
        band: the band.
        touching: whether it touches the one before it.
    """

    key: Hashable
    owner: int | None
    band: Band
    touching: bool = False


def side_by_side(items: Iterable[Item]) -> tuple[dict[Hashable, int], Row]:
    """Return the index of each band by its key, and a row without labels, with a frame for each owner."""
    cells, index, frames = list[Band](), dict[Hashable, int](), dict[int, tuple[int, int]]()
    last: int | None = None
    for key, owner, band, touching in items:
        if cells and not touching:
            cells.append(Band("", bands.NEAR if owner == last else bands.APART, bands.SPACE))
        index[key], last = len(cells), owner
        if owner is not None:
            frames[owner] = (frames.get(owner, (len(cells), 0))[0], len(cells))
        cells.append(band)
    return index, Row(tuple(cells), frames=tuple(frames.values()))


# ---- the runs of a program -------------------------------------------------------------------------------------------


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


def unit_runs(program: Program) -> Int64Array:
    """Return source address, destination address and bytes of the runs of unit 0 of block 0, (3, runs) int64."""
    bases = ([[group.src_base], [group.dst_base], [0]] for group in program.groups)
    return np.concatenate([group.packed + base for group, base in zip(program.groups, bases, strict=True)], axis=1)


def run_words(components: Sequence[Component], pairs: Sequence[Pair], address: int, nbytes: int) -> str:
    """Return the coordinates of a run in words, from its address in the source."""
    return _words(_coordinates(components, pairs, address, nbytes)[0])


def _words(values: Sequence[str]) -> str:
    return ", ".join(f"{axis} {value}" for axis, value in zip(AXES, values, strict=True) if value)


def _coordinates(
    components: Sequence[Component], pairs: Sequence[Pair], src: int, nbytes: int
) -> tuple[list[str], tuple[str, ...]]:
    """Return what a run holds of each axis, "" if nothing is to say, and its parts."""
    (low, pair), (high, other) = (locate_byte(components, pairs, "src", at) for at in (src, src + nbytes - 1))
    ends: Iterable[Any] = map(sorted, zip(low, high, strict=True))
    layer, _, _, token, head, byte = (f"{a}" if a == b else f"{a}-{b}" for a, b in ends)
    parts = tuple(dict.fromkeys((low.part, high.part)))
    values = [layer, " ".join(parts), "", "", ""]
    if pair is other and pair is not None:  # otherwise the run goes on in another layer or part
        form, partly = pair.src.form, (low.byte, high.byte) != (0, pair.nbytes - 1)
        values[2:] = ["" if form.opaque else token, head * form.headed, byte * partly]
    return values, parts


class Run(NamedTuple):
    """A run that is drawn: its number in order of source, what it holds of each axis, and its band."""

    number: int
    values: list[str]
    band: Band


def program_picture(program: Program, src: Any, dst: Any, title: str) -> Picture:
    """Return the runs of one unit as a picture: the source above, the destination below.

    Of many runs, the first and the last of each loop are drawn, and the others are counted. A frame is one allocation.

    Args:
        program: the program.
        src, dst: the layouts.
        title: the title of the picture, for who cannot see it.
    """
    table = unit_runs(program)
    table = table[:, np.argsort(table[0], kind="stable")]
    pairs = match(src.geometry, dst.geometry)
    runs = []
    for number in _chosen(program, table[0]):
        here, there, nbytes = table[:, number].tolist()
        values, parts = _coordinates(src.components, pairs, here, nbytes)
        cells = tuple(Band("", 1, part, 1) for part in parts) if len(parts) > 1 else ()
        words = f"{_words(values)}: {nbytes:,} bytes from {here:#x} to {there:#x}"
        fill = bands.MIXED if cells else parts[0]
        runs.append(Run(number, values, Band("", nbytes, fill, nbytes, cells, title=words)))
    counts = (len({pair.layer for pair in pairs}), len({pair.part for pair in pairs}), program.unit_tokens,
              max(len(pair.heads) for pair in pairs), max(pair.nbytes for pair in pairs))  # fmt: skip
    axes = [f"{axis} of {count:,}" for axis, count in zip(AXES, counts, strict=True)]
    lower, below = _side("destination", dst, table[1:], runs, axes, program.extents("dst"))
    upper, above = _side("source", src, table[::2], runs, axes, program.extents("src"))
    ribbons = (Ribbon(upper[k], lower[k], lower[k], run.band.parts[0]) for k, run in enumerate(runs))
    left_out = f"; {len(runs)} drawn, {program.runs - len(runs):,} left out" * (len(runs) < program.runs)
    headline = f"{run_times(program.runs, *program.run_nbytes)} a unit{left_out}"
    parts = tuple(dict.fromkeys(part for run in runs for part in run.band.parts))
    legend = (*parts, *([bands.LEFT_OUT] if left_out else []), bands.ALLOCATION)
    rows = (replace(above, above=True, ribbons=tuple(ribbons)), below)
    return Picture(title, (headline, f"from {src}", f"to {dst}"), bands.part_fills(parts), legend, rows, GAP)


def _pick(items: Sequence[Any], most: int) -> list[Any]:
    """Return as many of the first items as of the last ones, at most this many in all.

    >>> _pick(range(80), 3), _pick(range(2), 3), _pick(range(16), 1)
    ([0, 1, 79], [0, 1], [0])
    """
    last = min(most // 2, max(len(items) - (most + 1) // 2, 0))
    return [*items[: (most + 1) // 2], *items[len(items) - last :]]


def _chosen(program: Program, starts: Int64Array) -> list[int]:
    """Return the numbers of the runs to draw: the corners of all loops, as many as there is room for."""
    chosen = np.empty(0, dtype=np.int64)
    for most in range(MOST, 0, -1):
        corners = [
            group.src_base + run.src + sum(step * loop[1] for step, loop in zip(steps, run.loops, strict=True))
            for group in program.groups
            for run in _pick(group.runs, most)
            for steps in product(*(_pick(range(loop[0]), most) for loop in run.loops))
        ]
        chosen = np.unique(np.searchsorted(starts, np.array(corners, dtype=np.int64), "right") - 1)
        if chosen.size <= MOST:
            break
    return [int(k) for k in chosen[:MOST]]


def _side(
    side: str, layout: Any, table: Int64Array, runs: Sequence[Run], axes: Sequence[str], extents: tuple[int, int, int]
) -> tuple[dict[Hashable, int], Row]:
    """Return the index of each run's band, and the row of one side, in order of address.

    Args:
        side: source or destination.
        layout: the layout.
        table: addresses and bytes of all runs, in order of source.
        runs: those that are drawn.
        axes: names of the lines of labels.
        extents: of a unit.
    """
    order = np.argsort(table[0], kind="stable")
    starts, sizes = table[:, order]
    begins = np.array([stretch.start for stretch in stretches_of(layout.regions)], dtype=np.int64)
    memory = np.searchsorted(begins, starts, "right").tolist()  # number of the allocation
    places = sorted((at, k) for k, at in enumerate(np.argsort(order)[[run.number for run in runs]].tolist()))
    items, last = list[Item](), -1
    for at, k in (*places, (order.size, -1)):
        if count := at - last - 1:
            words = f"{count_of(count, 'run')} of {sizes[last + 1 : at].sum():,} bytes, left out"
            around = {memory[n] for n in (last, at) if 0 <= n < order.size}
            content = int(sizes[last + 1 : at].sum())
            left_out = Band(f"+{count:,}", 1, bands.LEFT_OUT, content, pale=True, title=words)
            items.append(Item(("before", at), around.pop() if len(around) == 1 else None, left_out))
        if k >= 0:
            touching = not count and at > 0 and bool(starts[at - 1] + sizes[at - 1] == starts[at])
            items.append(Item(k, memory[at], runs[k].band, touching))
        last = at
    index, row = side_by_side(items)
    named = []
    for axis, name in enumerate(axes):
        values = [(runs[k].values[axis], index[k]) for _, k in places]
        groups = ((value, [at for _, at in some]) for value, some in groupby(values, key=lambda each: each[0]))
        named.append(Line(tuple(Label(some[0], some[-1], value) for value, some in groups if value), name))
    lines = sorted((line for line in named if line.labels), key=lambda line: len(line.labels))
    spread = f"{'contiguous' if extents[0] == 1 else 'apart'}, in {count_of(len(set(memory)), 'allocation')}"
    lines.insert(0, Line((Label(0, len(row.cells) - 1, f"{run_times(*extents)}, {spread}"),), side))
    return index, replace(row, lines=tuple(lines if side == "source" else reversed(lines)))
