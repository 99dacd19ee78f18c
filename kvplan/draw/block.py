"""The picture of one block of a layout: nested bands; each row shows the inside of a band above it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from math import prod
from typing import NamedTuple

from kvplan.base.numbers import between, nbytes_text, number_ranges
from kvplan.base.values import integer
from kvplan.draw import bands
from kvplan.draw.bands import Band, Label, Line, Picture, Ribbon, Row
from kvplan.errors import BlockIndexError, IncompatibleLayoutsError, KVPlanError, LayoutError
from kvplan.layout.address_ranges import stretches_of
from kvplan.layout.components import Built, Component, Geometry
from kvplan.layout.places import first_from
from kvplan.layout.strides import Factors, span
from kvplan.program.passes import compile_geometry

SHOWN, CELLS = 4, 7  # bands of a row, and bands and gaps; if there are more, bands are left out
BETWEEN = 18  # pixels between rows
ALLOCATIONS = (Band("", bands.APART, bands.SPACE),)  # lies between them
Gaps = Callable[[int, int], tuple[Band, ...]]  # what lies between two addresses


def block_picture(layout: Built, block: int = 0) -> Picture:
    """Return the bytes of one block of a layout as a picture.

    Args:
        layout: plain data of any layout.
        block: id of the block.

    Raises:
        BlockIndexError: the layout has no such block.
        LayoutError: the block has too many runs to draw.

    >>> from kvplan import KVLayout
    >>> layout = KVLayout.from_spec({"notation": "layer: kv block token head dim", "dtype": "bf16",
    ...     "sizes": {"layer": 80, "block": 64, "token": 16, "head": 2, "dim": 128}})
    >>> picture = block_picture(layout.built)
    >>> picture.heading[1]
    'block 0: 1,310,720 bytes in 160 runs of 8,192 bytes, in 80 allocations'
    >>> picture.rows[1].caption
    ('k and v', ', 8,192 bytes each, 524,288 bytes apart, in layer 0', '2 runs')
    """
    block = integer("block", block, right="it is a block id", error=BlockIndexError)
    if not 0 <= block < layout.num_blocks:
        raise BlockIndexError(f"block {block}; blocks are 0 to {layout.num_blocks - 1}")
    memory = Geometry(layout.components, layout.num_blocks, layout.block_tokens)
    try:
        runs, least, most = compile_geometry(memory, memory).extents("src")
    except IncompatibleLayoutsError as error:
        raise LayoutError(f"too many runs to draw: {error}") from None
    kinds, allocations = _allocations(layout, block)
    rows: list[Row] = []
    for kind in kinds:
        _open(kind, (kind.name,) if len(kinds) > 1 else (), rows, inside=False)
    sizes = "one contiguous run" if runs == 1 else f"{runs:,} runs of {between(least, most)} bytes"
    where = f", in {allocations:,} allocations" if allocations > 1 else ""
    headline = f"block {block:,}: {nbytes_text(layout.block_nbytes)} in {sizes}{where}"
    described = (f"{''.join(row.caption[:2])}: {'; '.join(c.words for c in row.cells if c.words)}." for row in rows)
    gaps = {cell.fill for row in rows for cell in row.cells}
    return Picture(
        f"Block {block:,} of {layout.num_blocks:,}: {layout.notation}",
        " ".join((f"Layout {layout.notation}; {headline}.", *described)),
        (layout.notation, headline),
        bands.part_fills(layout.parts),
        (*layout.parts, *(gap for gap in (bands.PADDING, bands.OTHERS) if gap in gaps), bands.RUN),
        tuple(rows),
        BETWEEN,
    )


# ---- rows ------------------------------------------------------------------------------------------------------------


def _open(band: Band, path: tuple[str, ...], rows: list[Row], *, inside: bool) -> None:
    """Append the row of a band's inside, and a row of each kind of band in it; ``inside`` one run, or not."""
    what, nbytes = _caption(band)
    place = f", in {', '.join(path)}" if path else ""
    note = "same run" if inside else "one run" if band.runs == 1 else f"{band.runs:,} runs"
    forms = tuple(map(_lines, zip(*(cell.labels for cell in band.cells), strict=True)))
    rows.append(Row((what, f", {nbytes}{place}", note), band.cells, forms, outlined=not inside))
    here = len(rows) - 1
    kinds: dict[object, list[int]] = {}
    for k, cell in enumerate(band.cells):
        if cell.cells and not cell.pale:
            kinds.setdefault(cell.shape, []).append(k)
    for k, *others in kinds.values():
        cell = band.cells[k]
        if here == len(rows) - 1:
            rows[here] = replace(rows[here], ribbons=(Ribbon(k, 0, len(cell.cells) - 1),))
        # Coordinates of a loop are always alike, but parts need not be: so the picture names equal parts.
        alike = f" ({', '.join(band.cells[n].name for n in others)} alike)" if others and band.axis == "part" else ""
        around = () if band.axis == "allocation" else path
        _open(cell, (*around, cell.name + alike), rows, inside=band.runs == 1)


def _lines(labels: Sequence[tuple[str, str]]) -> tuple[Line, ...]:
    return tuple(Line(tuple(Label(k, k, text) for k, text in enumerate(texts))) for texts in zip(*labels, strict=True))


def _caption(band: Band) -> tuple[str, str]:
    """Return the axis and the number of the bands inside, and the bytes of each."""
    each = next(cell for cell in band.cells if not cell.gap)
    what = band.axis or "bytes"
    if band.axis == "part":
        what = " and ".join(band.parts) if band.count <= 3 else f"{band.count} parts"
    elif band.step is not None or band.axis == "allocation":
        what = f"{band.axis} x {band.count:,}"
    if band.axis == "allocation":
        return what, f"{nbytes_text(each.content)} of the block in each"
    if band.step is None:
        return what, nbytes_text(band.content)
    spaced = "no gaps" if band.step == each.nbytes else f"{nbytes_text(band.step)} apart"
    return what, f"{nbytes_text(each.content)} each, {spaced}"


# ---- from addresses to bands -----------------------------------------------------------------------------------------


class _Loop(NamedTuple):
    """One factor of an axis: ``steps`` steps of ``stride`` bytes, each of ``place`` coordinates, from ``first`` on."""

    axis: str
    first: int
    place: int
    steps: int
    stride: int

    def name(self, k: int) -> str:
        start = self.first + k * self.place
        noun = "byte" if self.axis == "dim" else self.axis
        return f"{noun} {start}" if self.place == 1 else f"{noun}s {start}-{start + self.place - 1}"


class _Item(NamedTuple):
    """What a component holds of the block: loops over contiguous bytes, the largest stride first."""

    address: int
    layer: int
    part: str
    head: int
    loops: tuple[_Loop, ...]
    nbytes: int

    @property
    def end(self) -> int:
        return self.address + span(tuple((loop.steps, loop.stride) for loop in self.loops)) + self.nbytes


def _item(component: Component, block: int) -> _Item:
    form = component.form
    axes = (("subblock" if form.opaque else "token", form.token, 0), ("head", form.head, form.head_start),
            ("dim", form.dim, 0))  # fmt: skip
    loops = sorted((loop for axis in axes for loop in _loops(*axis)), key=lambda loop: -loop.stride)
    row = loops.pop() if loops and loops[-1].axis == "dim" and loops[-1].stride == 1 else None
    address, nbytes = component.address + form.block_offset(block), 1 if row is None else row.steps
    return _Item(address, component.layer, component.part, form.head_start, tuple(loops), nbytes)


def _loops(axis: str, factors: Factors, first: int) -> list[_Loop]:
    places = [prod(count for count, _ in factors[k + 1 :]) for k in range(len(factors))]
    return [_Loop(axis, first, place, *factor) for place, factor in zip(places, factors, strict=True) if factor[0] > 1]


def _allocations(layout: Built, block: int) -> tuple[list[Band], int]:
    """Return a band for each kind of allocation, which stands for one or for several, and the number of all."""
    memory = stretches_of(layout.regions)
    begins = [stretch.start for stretch in memory]
    within: dict[int, list[Component]] = {}
    for component in layout.components:
        address = component.address + component.form.block_offset(block)
        within.setdefault(bisect_right(begins, address) - 1, []).append(component)
    heads_apart = len(layout.components) > len({(c.layer, c.part) for c in layout.components})
    named = partial(_name, parts=len(layout.parts) > 1, heads=heads_apart)
    kinds: dict[object, list[tuple[Band, list[Component]]]] = {}
    for number, components in within.items():
        gaps = _gaps(components, memory[number].stop)
        band = _nest([_item(component, block) for component in components], gaps)
        end = [gap for gap in gaps(band.stop, memory[number].stop) if gap.fill == bands.PADDING][:1]
        cells = (*(band.cells or (replace(band, name=band.fill),)), *end)
        nbytes = band.nbytes + sum(gap.nbytes for gap in end)
        band = replace(band, nbytes=nbytes, cells=cells, name=named(components))
        kinds.setdefault(band.kind, []).append((band, components))
    several = []
    for alike in kinds.values():
        each = sorted((band for band, _ in alike), key=lambda band: band.start)
        band = each[0] if len(each) == 1 else _row("allocation", each, lambda *_: ALLOCATIONS)
        name = named([component for _, components in alike for component in components])
        several.append(replace(band, name=name))
    return several, len(within)


def _name(components: Sequence[Component], *, parts: bool, heads: bool) -> str:
    """Return the layers of components, and their part and their heads, if these lie apart."""
    layers = sorted({component.layer for component in components})
    name = f"layer{'s' * (len(layers) > 1)} {number_ranges(layers, ',')}"
    own_parts = {component.part for component in components}
    own_heads = {number_ranges(component.form.heads) for component in components}
    name += f" {min(own_parts)}" if parts and len(own_parts) == 1 else ""
    return name + (f" head {min(own_heads)}" if heads and len(own_heads) == 1 else "")


def _gaps(components: Sequence[Component], end: int) -> Gaps:
    """Return a function that divides the bytes between two addresses into padding, and content of other blocks."""

    def gaps(start: int, stop: int) -> tuple[Band, ...]:
        try:
            following = (first_from(component, start) for component in components)
            content = min((at for at in following if at is not None), default=stop)
        except KVPlanError:  # strides interleave in too many ways
            content = start
        content = min(content, stop, end)
        lengths = ((bands.PADDING, content - start), (bands.OTHERS, stop - content))
        return tuple(Band(name, nbytes, name) for name, nbytes in lengths if nbytes > 0)

    return gaps


def _nest(items: Sequence[_Item], gaps: Gaps) -> Band:
    """Return the band of all bytes of some items."""
    low, first = min(item.address for item in items), items[0]
    if len(items) == 1 and not first.loops:
        return Band("", first.nbytes, first.part, first.nbytes, start=low)
    inside = [item._replace(loops=item.loops[1:]) for item in items]
    same = len({item.loops[:1] for item in items}) == 1 and first.loops
    if same and max(item.end for item in inside) - low <= first.loops[0].stride:
        outer, child = first.loops[0], _nest(inside, gaps)
        every = [replace(child, name=outer.name(k), start=low + k * outer.stride) for k in range(outer.steps)]
        return _row(outer.axis, every, gaps)
    for axis in ("part", "layer", "head"):
        groups: dict[object, list[_Item]] = {}
        for item in sorted(items, key=lambda item: item.address):
            groups.setdefault(getattr(item, axis), []).append(item)
        if len(groups) > 1 and all(max(i.end for i in a) <= b[0].address for a, b in pairwise(groups.values())):
            return _in_order(axis, groups, gaps)
    # Items that interleave in no order of loops are drawn as one band.
    pieces = [prod(loop.steps for loop in item.loops) for item in items]
    content = sum(item.nbytes * count for item, count in zip(items, pieces, strict=True))
    return Band("", max(item.end for item in items) - low, bands.MIXED, content, runs=sum(pieces), start=low)


def _in_order(axis: str, items: dict[object, list[_Item]], gaps: Gaps) -> Band:
    """Return the band of groups of items in order of address; equal and evenly spaced neighbours are a band, too."""
    known: dict[object, Band] = {}  # layers that lie alike are looked at once
    groups: list[list[Band]] = []
    for key, some in items.items():
        start = some[0].address
        alike = tuple(item._replace(address=item.address - start, layer=0, head=0) for item in some)
        known[alike] = known.get(alike) or _nest(some, gaps)
        band = replace(known[alike], name=f"{axis} {key}".removeprefix("part "), start=start)
        group = groups[-1] if groups else []
        even = len(group) < 2 or start - group[-1].start == group[1].start - group[0].start
        if axis != "part" and group and even and group[0].kind == band.kind:
            group.append(band)
        else:
            groups.append([band])
    loops = []
    for group in groups:
        ends = [band.name.rpartition(" ")[2] for band in group]
        numbers = number_ranges(map(int, ends), ",") if ends[0].isdecimal() else f"{ends[0]}-{ends[-1]}"
        loops.append(replace(_row(axis, group, gaps), name=f"{axis}s {numbers}") if len(group) > 1 else group[0])
    return loops[0] if len(loops) == 1 else _row(axis, loops, gaps)


def _row(axis: str, every: Sequence[Band], gaps: Gaps) -> Band:
    """Return the band of some bands in order of address; those of allocations are alike."""
    count, first, last = len(every), every[0], every[-1]
    steps = {b.start - a.start for a, b in pairwise(every)}
    step = steps.pop() if axis != "allocation" and len(steps) == len({band.shape for band in every}) == 1 else None
    alike = axis == "allocation" or (step is not None and axis != "part" and len({band.kind for band in every}) == 1)
    apart = gaps(first.stop, every[1].start)
    shown = [*every[:SHOWN]]
    if count + (count - 1) * len(apart) > CELLS or count > SHOWN:
        begin = 1 if alike else 2
        between = () if step == first.nbytes else apart or (Band("", 1, bands.SPACE),)
        shown = [*every[:begin], _left_out(every[begin:-1], between), last]
    cells = [shown[0]]
    for band in shown[1:]:
        cells += [*gaps(cells[-1].stop, band.start), band]
    parts = tuple(dict.fromkeys(part for cell in cells for part in cell.parts))
    content, runs = sum(band.content for band in every), sum(band.runs for band in every)
    runs -= sum(a.stop == b.start for a, b in pairwise(every))
    fill = parts[0] if len(parts) == 1 else bands.MIXED
    return Band("", last.stop - first.start, fill, content, tuple(cells), runs, axis, count, step, start=first.start)


def _left_out(left_out: Sequence[Band], apart: tuple[Band, ...]) -> Band:
    """Return a pale band for some bands, with three examples."""
    like, alike = left_out[0], len({band.kind for band in left_out}) == 1
    name = f"{len(left_out):,} {'more' if alike else 'others'}"
    nbytes, content = left_out[-1].stop - like.start, sum(band.content for band in left_out)
    cells = (like, *apart, like, *apart, like)
    return Band(name, nbytes, like.fill, content, cells, count=len(left_out), pale=True, start=like.start)
