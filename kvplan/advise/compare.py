"""Two layouts side by side: what moves where, and the first place where they stop being contiguous together."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from kvplan.base.limits import LIMITS
from kvplan.base.numbers import number_ranges
from kvplan.errors import LayoutError
from kvplan.layout.components import Component, Form
from kvplan.layout.kvlayout import KVLayout
from kvplan.layout.strides import Factor, Factors, extent, span
from kvplan.program.matching import Pair, heads_of
from kvplan.program.passes import Passes
from kvplan.program.program import Program

OUTSIDE = ("block", "unit", "end")


class Place(NamedTuple):
    """Whose byte one is: global numbers of layer and head, the part's name, block, token slot, byte of the row.

    Of an opaque part, the token slot is the number of the sub-block.
    """

    layer: int
    part: str
    block: int
    token: int
    head: int
    byte: int


class Onward(NamedTuple):
    """What one side holds after the end of a run.

    Attributes:
        axis: along which it goes on: ``layer``, ``part``, ``token``, ``head`` or ``dim``; ``unit`` and ``block`` where
            it leaves the unit, ``end`` where no content follows.
        gap_nbytes: bytes that are skipped first.
        lacked: whether what follows is content that the other side does not hold.
        text: the same in words.
    """

    axis: str
    gap_nbytes: int
    lacked: bool
    text: str


class Break(NamedTuple):
    """Where two layouts stop being contiguous together, seen from the first byte of the destination's unit.

    Attributes:
        nbytes: of the run that ends there.
        start: the run's first byte.
        holds: what the run is, in words.
        src, dst: how each side goes on.
        axis: the axis that breaks the run; None where the run is the whole unit.
    """

    nbytes: int
    start: Place
    holds: str
    src: Onward
    dst: Onward
    axis: str | None


def first_break(src: KVLayout, dst: KVLayout, made: Passes) -> Break:
    """The first place where two layouts stop being contiguous together.

    Args:
        src, dst: the layouts.
        made: what the compiler's passes made of them.

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
    """Source address of the run that follows the one at ``begin`` in the destination's order."""
    later = [
        (int(dst), int(src))
        for group in program.groups
        for src, dst in zip(group.offsets[0] + group.src_base, group.offsets[1] + group.dst_base, strict=True)
        if dst > begin
    ]
    return min(later)[1]


def _breaking(src: Onward, dst: Onward) -> str | None:
    """The axis by which the source goes on; where that leaves the unit, the destination's; None where both do."""
    for side in (src, dst):
        if side.lacked:
            return side.axis
    for side in (src, dst):
        if side.axis not in OUTSIDE:
            return side.axis
    return None


class _Side:
    """The reverse map of one side: from an address to the content that follows it.

    Attributes:
        layout: the side.
        halves: of a component, where in its row each part begins that the pairs name: a fused K and V are two.
    """

    def __init__(self, layout: KVLayout, made: Passes, side: str) -> None:
        self.layout = layout
        self.units = made.program.src_units if side == "src" else made.program.dst_units
        self.halves: dict[tuple[int, str], list[tuple[int, str]]] = {}
        self.heads: dict[tuple[int, str], range] = {}
        for pair in made.pairs:
            held, at = (pair.src, pair.src_dim) if side == "src" else (pair.dst, pair.dst_dim)
            self.halves.setdefault((held.layer, held.part), []).append((at, pair.part))
            known = self.heads.setdefault((held.layer, pair.part), pair.heads)  # heads held apart are several pairs
            both = range(min(known.start, pair.heads.start), max(known.stop, pair.heads.stop))
            self.heads[held.layer, pair.part] = both
        self.headed = {(c.layer, part): c.form.headed for c in layout.components
                       for _, part in self.halves.get((c.layer, c.part), [(0, c.part)])}  # fmt: skip

    def place(self, address: int) -> Place:
        """Whose byte a byte of content is."""
        found = self.next_from(address)
        if found is None or found[0] != address:
            raise LookupError(f"no content at {address:#x}")  # a run's bytes are content on both sides
        return found[1]

    def next_from(self, address: int) -> tuple[int, Place] | None:
        """Address and place of the first content byte at or after an address; None where none follows."""
        best: tuple[int, Component, int, tuple[int, ...]] | None = None
        for component in self.layout.components:
            form = component.form
            terms = _terms(form)
            factors, reach = tuple(factor for factor, _ in terms), span((*form.block, *form.inner))
            for block, begin in enumerate(form.table or (0,)):
                distance = address - component.address - begin
                if distance > reach or (best and best[0] <= component.address + begin):
                    continue
                found = _least(factors, distance)
                if found is None:
                    continue
                at = component.address + begin + found[0]
                if best is None or at < best[0]:
                    best = (at, component, block, found[1])
        if best is None:
            return None
        at, component, block, digits = best
        return at, self._place(component, block, digits)

    def _place(self, component: Component, table_block: int, digits: tuple[int, ...]) -> Place:
        form = component.form
        by_factor = {key: digit for (_, key), digit in zip(_terms(form), digits, strict=True)}
        at = {}
        for axis, factors in (("block", form.block), ("token", form.token), ("head", form.head), ("dim", form.dim)):
            coordinate = 0
            for k, (count, _) in enumerate(factors):
                coordinate = coordinate * count + by_factor[axis, k]
            at[axis] = coordinate
        part, byte = component.part, at["dim"]
        for begin, name in self.halves.get((component.layer, component.part), ()):
            if at["dim"] >= begin:
                part, byte = name, at["dim"] - begin
        block = table_block if form.table is not None else at["block"]
        return Place(component.layer, part, block, at["token"], at["head"] + form.head_start, byte)

    def onward(self, begin: int, nbytes: int, start: Place, last: Place) -> Onward:
        """How this side goes on after a run of so many bytes, whose first and last byte are told."""
        end = begin + nbytes
        found = self.next_from(end)
        if found is None:
            return Onward("end", 0, lacked=False, text="ends there")
        at, place = found
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
        """The part of this layout that holds a place, whose own part is that of the pair: K of a fused K and V."""
        return place.part if place.part in self.layout.parts else "kv"

    def _region(self, address: int) -> int:
        return max(region.address for region in self.layout.regions if region.address <= address)


def _first_differing(start: Place, later: Place) -> str:
    """The outermost axis along which two places differ."""
    order = {"block": "block", "layer": "layer", "part": "part", "token": "token", "head": "head", "dim": "byte"}
    return next((axis for axis, name in order.items() if getattr(start, name) != getattr(later, name)), "dim")


def _named(axis: str, last: Place, place: Place) -> str:
    if axis == "part":
        return place.part.upper() if place.part in ("k", "v") else f"part {place.part!r}"
    if axis == "dim":
        return f"byte {place.byte:,} of the same row"
    number = getattr(place, axis)
    return f"the next {axis}" if number == getattr(last, axis) + 1 else f"{axis} {number:,}"


def _terms(form: Form) -> list[tuple[Factor, tuple[str, int]]]:
    """Factors of all axes, the largest stride first, and whose each is."""
    axes = (("block", form.block), ("token", form.token), ("head", form.head), ("dim", form.dim))
    found = [(factor, (axis, k)) for axis, factors in axes for k, factor in enumerate(factors)]
    return sorted(found, key=lambda term: -term[0][1])


def _least(factors: Factors, distance: int, looked: list[int] | None = None) -> tuple[int, tuple[int, ...]] | None:
    """The smallest offset of at least ``distance``, and the digit of every factor; strides descend.

    >>> _least(((4, 100), (16, 2)), 130), _least(((4, 100), (16, 2)), 131), _least(((2, 8),), 9)
    ((130, (1, 15)), (200, (2, 0)), None)
    """
    if not factors:
        return (0, ()) if distance <= 0 else None
    looked = [0] if looked is None else looked
    (count, stride), rest = factors[0], factors[1:]
    low = max(0, -(-(distance - span(rest)) // stride))
    best: tuple[int, tuple[int, ...]] | None = None
    for digit in range(low, min(count - 1, max(low, -(-distance // stride))) + 1):
        looked[0] += 1
        if looked[0] > LIMITS.rows:
            raise LayoutError(
                f"strides that do not nest, and over {LIMITS.rows:,} rows to look at for what follows a run"
            )
        found = _least(rest, distance - digit * stride, looked)
        if found is not None and (best is None or digit * stride + found[0] < best[0]):
            best = (digit * stride + found[0], (digit, *found[1]))
    return best


def _holds(start: Place, last: Place, nbytes: int, pairs: tuple[Pair, ...]) -> str:
    """What a run is: the axes it spans, where it is all of them."""
    pair = next(p for p in pairs if (p.layer, p.part) == (start.layer, start.part))
    layers = {layer: k for k, layer in enumerate(sorted({p.layer for p in pairs}))}
    parts = {part: k for k, part in enumerate(dict.fromkeys(p.part for p in pairs))}  # layers may hold different ones
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
    """What each side holds that the other lacks: side (``src``, ``dst``) and a line for each range of heads."""
    for heads, src, dst in heads_of(made.pairs, headed=True):
        for side, held in (("src", src), ("dst", dst)):
            rest = [head for head in held if head not in heads]
            if rest:
                yield side, f"heads {number_ranges(rest)} stay where they are"


def evenly_layered(layout: KVLayout) -> bool:
    """Whether all layers are alike, equally spaced and outside of all else in a unit: few then tell how more go.

    Where layers stand inside tokens, heads or K and V, the last of them may touch the next token: some are not enough.

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
