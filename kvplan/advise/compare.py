"""Compare two layouts: find the first place where they stop being contiguous together."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from kvplan.base.numbers import number_ranges
from kvplan.layout.components import Component
from kvplan.layout.inverse import find, first_from
from kvplan.layout.kvlayout import KVLayout
from kvplan.layout.strides import extent
from kvplan.program.matching import Pair, heads_of
from kvplan.program.passes import Passes
from kvplan.program.program import Program

OUTSIDE = ("block", "unit", "end")


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


class Onward(NamedTuple):
    """The content of one side that follows the end of a run.

    Attributes:
        axis: the axis along which content continues: ``layer``, ``part``, ``token``, ``head`` or ``dim``; ``unit`` or
            ``block`` if the next content is outside the unit; ``end`` if no content follows.
        gap_nbytes: bytes without content before the next content.
        lacked: whether the other side lacks that content.
        text: all of this in words.
    """

    axis: str
    gap_nbytes: int
    lacked: bool
    text: str


class Break(NamedTuple):
    """The first place in the destination's unit at which two layouts stop being contiguous together.

    Attributes:
        nbytes: bytes of the run that ends at this place.
        start: coordinates of the run's first byte.
        holds: content of the run in words.
        src, dst: the content that follows on each side.
        axis: the axis that ends the run; None if the run is the whole unit.
    """

    nbytes: int
    start: Place
    holds: str
    src: Onward
    dst: Onward
    axis: str | None


def first_break(src: KVLayout, dst: KVLayout, made: Passes) -> Break:
    """Find the first place where two layouts stop being contiguous together.

    Args:
        src, dst: the layouts.
        made: the result of the compiler's passes.

    >>> from kvplan.program.passes import passes
    >>> sizes = {"block": 4, "token": 16, "head": 2, "dim": 128}
    >>> hnd, nhd = (KVLayout.from_spec({"notation": n, "sizes": sizes})
    ...             for n in ("block head token dim", "block token head dim"))
    >>> found = first_break(hnd, nhd, passes(hnd.geometry, nhd.geometry))
    >>> found.nbytes, found.holds, found.src.text, found.dst.text, found.axis
    (256, 'one (token, head) row', 'goes on with the next token', 'goes on with the next head', 'token')
    """
    program = made.program
    starts = []
    for group in program.groups:
        offsets = group.offsets
        at = int(np.argmin(offsets[1]))
        first, size = (int(offsets[0][at]) + group.src_base, int(offsets[1][at]) + group.dst_base), int(offsets[2][at])
        starts.append((first[1], first[0], size))
    dst_at, src_at, nbytes = min(starts)
    here, there = _Side(src, made, "src"), _Side(dst, made, "dst")
    start, last = here.place(src_at), here.place(src_at + nbytes - 1)
    onward = (here.onward(src_at, nbytes, start, last), there.onward(dst_at, nbytes, start, last))
    holds = _holds(start, last, nbytes, made.pairs)
    axis = None
    if nbytes != program.unit_nbytes:
        axis = _breaking(*onward) or _first_differing(start, here.place(_next_run(program, dst_at)))
    return Break(nbytes, start, holds, *onward, axis)


def _next_run(program: Program, begin: int) -> int:
    """Return the source address of the next run: the run that follows the run at ``begin`` in the destination."""
    later = [
        (int(dst), int(src))
        for group in program.groups
        for src, dst in zip(group.offsets[0] + group.src_base, group.offsets[1] + group.dst_base, strict=True)
        if dst > begin
    ]
    return min(later)[1]


def _breaking(src: Onward, dst: Onward) -> str | None:
    """Return the axis that ends a run, or None.

    It is the axis along which the source continues; or, if the source leaves the unit there, the destination's axis.
    """
    for side in (src, dst):
        if side.lacked:
            return side.axis
    for side in (src, dst):
        if side.axis not in OUTSIDE:
            return side.axis
    return None


class _Side:
    """The inverse map of one side, from an address to the content at or after it.

    Attributes:
        layout: the side's layout.
        units: units per block.
        halves: for each (layer, part) of the layout, the parts in its rows, each as (first byte in the row, part).
            A row of fused K and V holds two parts.
        heads: for each (layer, part), the heads that move.
        headed: for each (layer, part), whether it has a head axis.
    """

    def __init__(self, layout: KVLayout, made: Passes, side: str) -> None:
        self.layout = layout
        self.units = made.program.src_units if side == "src" else made.program.dst_units
        self.halves: dict[tuple[int, str], list[tuple[int, str]]] = {}
        self.heads: dict[tuple[int, str], range] = {}
        for pair in made.pairs:
            held, at = (pair.src, pair.src_dim) if side == "src" else (pair.dst, pair.dst_dim)
            self.halves.setdefault((held.layer, held.part), []).append((at, pair.part))
            known = self.heads.setdefault((held.layer, pair.part), pair.heads)  # separate heads give several pairs
            both = range(min(known.start, pair.heads.start), max(known.stop, pair.heads.stop))
            self.heads[held.layer, pair.part] = both
        self.headed = {(c.layer, part): c.form.headed for c in layout.components
                       for _, part in self.halves.get((c.layer, c.part), [(0, c.part)])}  # fmt: skip

    def place(self, address: int) -> Place:
        """Return the coordinates of a byte of content."""
        found = find(self.layout.components, address)
        if found is None:
            raise LookupError(f"no content at {address:#x}")  # never: every byte of a run is content on both sides
        component, (block, token, head, byte), _ = found
        part, first = component.part, 0
        for begin, name in self.halves.get((component.layer, component.part), ()):
            if byte >= begin:
                part, first = name, begin
        return Place(component.layer, part, block, token, head + component.form.head_start, byte - first)

    def onward(self, begin: int, nbytes: int, start: Place, last: Place) -> Onward:
        """Return the content that follows a run on this side; ``start`` and ``last`` are its first and last byte."""
        end = begin + nbytes
        later = (first_from(component, end) for component in self.layout.components)
        at = min((address for address in later if address is not None), default=None)
        if at is None:
            return Onward("end", 0, lacked=False, text="ends there")
        place = self.place(at)
        axis = _first_differing(start, place)
        form = self.layout.component(place.layer, self._held_as(place)).form
        row = (place.layer, place.part)
        lacked = row in self.heads and self.headed[row] and place.head not in self.heads[row]
        if lacked:
            axis, name = "head", f"head {place.head}, which the other side lacks"
        elif axis == "token" and place.token >= extent(form.token) // self.units:
            axis, name = "unit", "the next unit of its block"
        elif axis == "token" and form.opaque:
            axis, name = "subblock", f"sub-block {place.token:,} of its block"
        else:
            name = _named(axis, last, place)
        if at == end:
            return Onward(axis, 0, lacked, f"goes on with {name}")
        if self._region(begin) != self._region(at):
            return Onward(axis, at - end, lacked, f"ends a tensor: {name} is in another")
        return Onward(axis, at - end, lacked, f"skips {at - end:,} bytes up to {name}")

    def _held_as(self, place: Place) -> str:
        """Return this layout's name of the part of a place: a pair may name K if the layout holds fused K and V."""
        return place.part if place.part in self.layout.parts else "kv"

    def _region(self, address: int) -> int:
        return max(region.address for region in self.layout.regions if region.address <= address)


def _first_differing(start: Place, later: Place) -> str:
    """Return the outermost axis along which two places differ."""
    order = {"block": "block", "layer": "layer", "part": "part", "token": "token", "head": "head", "dim": "byte"}
    return next((axis for axis, name in order.items() if getattr(start, name) != getattr(later, name)), "dim")


def _named(axis: str, last: Place, place: Place) -> str:
    if axis == "part":
        return place.part.upper() if place.part in ("k", "v") else f"part {place.part!r}"
    if axis == "dim":
        return f"byte {place.byte:,} of the same row"
    number = getattr(place, axis)
    return f"the next {axis}" if number == getattr(last, axis) + 1 else f"{axis} {number:,}"


def _holds(start: Place, last: Place, nbytes: int, pairs: tuple[Pair, ...]) -> str:
    """Describe the content of a run by the axes of which it holds all coordinates."""
    pair = next(p for p in pairs if (p.layer, p.part) == (start.layer, start.part))
    layers = {layer: k for k, layer in enumerate(sorted({p.layer for p in pairs}))}
    parts = {part: k for k, part in enumerate(dict.fromkeys(p.part for p in pairs))}  # layers may hold different parts
    from_layer, to_layer = sorted((layers[start.layer], layers[last.layer]))
    from_part, to_part = sorted((parts[start.part], parts[last.part]))
    counts = {
        "layer": to_layer - from_layer + 1,
        "part": to_part - from_part + 1,
        "token": last.token - start.token + 1,
        "head": last.head - start.head + 1,
    }
    spanned = {(p.layer, p.part) for p in pairs if from_layer <= layers[p.layer] <= to_layer}
    held = sum(from_part <= parts[part] <= to_part for _, part in spanned)
    sparse = held != counts["layer"] * counts["part"]  # not every layer holds every part
    whole = held * max(counts["token"], 1) * max(counts["head"], 1)
    row = "(token, head) row" if pair.src.form.headed or pair.dst.form.headed else "token row"
    if pair.src.form.opaque and pair.dst.form.opaque:
        row = "sub-block" if pair.src.form.subblocks > 1 or pair.dst.form.subblocks > 1 else "block"
    if whole * pair.nbytes != nbytes:
        if whole == 1:
            return f"part of one {row}: {nbytes:,} of {pair.nbytes:,} bytes"
        return "no whole number of rows"
    if whole == 1:
        return f"one {row}"
    both = {start.part, last.part} == {"k", "v"} and counts["part"] == 2
    names = {"part": "K and V" if both else f"{counts['part']} parts"}
    if pair.src.form.opaque:
        names["token"] = f"{counts['token']:,} sub-blocks"
    if sparse:
        names |= {"part": f"{held:,} parts of layers"}
        counts = {**counts, "layer": 1, "part": held}
    words = [names.get(axis, f"{count:,} {axis}s") for axis, count in counts.items() if count > 1]
    return f"{' x '.join(words)}, whole rows"


def untouched(made: Passes) -> Iterator[tuple[str, str]]:
    """Yield the side (``src`` or ``dst``) that holds heads that the other side lacks, and a line of text on them."""
    for heads, src, dst in heads_of(made.pairs, headed=True):
        for side, held in (("src", src), ("dst", dst)):
            rest = [head for head in held if head not in heads]
            if rest:
                yield side, f"heads {number_ranges(rest)} stay where they are"


def evenly_layered(layout: KVLayout) -> bool:
    """Return whether layers are equal, evenly spaced and outermost in a unit, so that counts of few layers suffice.

    If layers lie inside tokens, heads, or K and V, the last layer may touch the next token; then all are needed.

    >>> spec = {"notation": "layer: block token dim", "sizes": {"layer": 8, "block": 4, "token": 16, "dim": 8}}
    >>> evenly_layered(KVLayout.from_spec(spec))
    True
    >>> evenly_layered(KVLayout.from_spec(spec | {"notation": "(block token) layer dim"}))
    False
    """
    lines: dict[str, list[Component]] = {}
    for component in layout.components:
        lines.setdefault(component.part, []).append(component)
    steps, firsts = set(), []
    for line in lines.values():
        if [c.layer for c in line] != list(layout.layers) or len({c.form for c in line}) > 1:
            return False
        steps |= {b.address - a.address for a, b in pairwise(line)}
        firsts.append(line[0].address)
    inner = [stride for c in layout.components for _, stride in c.form.inner]
    return len(steps) == 1 and min(steps) > max([max(firsts) - min(firsts), *inner])
