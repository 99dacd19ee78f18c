"""The picture of one block of a layout: nested bands; each row shows the inside of a band above it.

A block is a table of contiguous pieces, a line for each row of content. In order of address, the outermost axis is the
one whose values lie together; what it holds is looked at in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import pairwise, takewhile
from math import prod
from typing import Any

import numpy as np

from kvplan.base.numbers import between, nbytes_text, number_ranges
from kvplan.base.values import integer
from kvplan.draw import bands
from kvplan.draw.bands import Band, Picture, Ribbon, Row
from kvplan.draw.svg import svg, text_html
from kvplan.errors import BlockIndexError, KVPlanError, LayoutError
from kvplan.layout.address_ranges import stretches_of
from kvplan.layout.components import Built, Component
from kvplan.layout.places import first_from
from kvplan.layout.strides import Factors, extent, offsets_of
from kvplan.program.program import merge_ranges

SHOWN, CELLS = 4, 7  # bands of a row, and bands and gaps; if there are more, bands are left out
BETWEEN = 18  # pixels between rows
MOST = 1 << 20  # pieces of a block
COLUMNS = ("start", "nbytes", "layer", "part", "token", "subblock", "head", "byte")
PIECE = np.dtype([(name, np.int64) for name in COLUMNS])
ALLOCATIONS = (Band("", bands.APART, bands.SPACE),)  # lies between them
Gaps = Callable[[int, int], tuple[Band, ...]]  # what lies between two addresses
Pieces = np.ndarray[Any, Any]  # of PIECE, in order of address


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
    pieces = _pieces(layout, block)
    sizes = merge_ranges(pieces["start"], pieces["nbytes"])[1]
    kinds, rows = _Nest(layout).kinds(pieces), list[Row]()
    for kind in kinds:
        _open(kind, (kind.name,) if len(kinds) > 1 else (), rows, inside=False)
    allocations = sum(kind.count if kind.axis == "allocation" else 1 for kind in kinds)
    runs = f"{len(sizes):,} runs of {between(int(sizes.min()), int(sizes.max()))} bytes"
    where = f", in {allocations:,} allocations" if allocations > 1 else ""
    headline = f"{nbytes_text(layout.block_nbytes)} in {'one contiguous run' if len(sizes) == 1 else runs}{where}"
    gaps = {cell.fill for row in rows for cell in row.cells}
    return Picture(
        f"Block {block:,} of {layout.num_blocks:,}: {layout.notation}",
        (layout.notation, f"block {block:,}: {headline}"),
        bands.part_fills(layout.parts),
        (*layout.parts, *(gap for gap in (bands.PADDING, bands.OTHERS) if gap in gaps), bands.RUN),
        tuple(rows),
        BETWEEN,
    )


def layout_html(layout: Any) -> str:
    """Return a :class:`kvplan.KVLayout` as HTML: its notation and sizes, and the picture of block 0.

    >>> from kvplan import KVLayout
    >>> layout = KVLayout.from_spec({"notation": "block token dim", "sizes": {"block": 4, "token": 16, "dim": 64}})
    >>> "2,048 bytes in one contiguous run" in layout._repr_html_()
    True
    """
    try:
        return text_html(str(layout), svg(block_picture(layout.built)))
    except LayoutError:  # too many runs to draw
        return text_html(str(layout), "")


# ---- rows ------------------------------------------------------------------------------------------------------------


def _open(band: Band, path: tuple[str, ...], rows: list[Row], *, inside: bool) -> None:
    """Append the row of a band's inside, and a row of each kind of band in it; ``inside`` one run, or not."""
    what, nbytes = _caption(band)
    place = f", in {', '.join(path)}" if path else ""
    note = "same run" if inside else "one run" if band.runs == 1 else f"{band.runs:,} runs"
    here = len(rows)
    rows.append(Row(band.cells, (what, f", {nbytes}{place}", note), outlined=not inside))
    kinds: dict[object, list[int]] = {}
    for k, cell in enumerate(band.cells):
        if cell.cells and not cell.pale:
            kinds.setdefault(cell.shape, []).append(k)
    for k, *others in kinds.values():
        cell = band.cells[k]
        if here == len(rows) - 1:
            rows[here] = replace(rows[here], ribbons=(Ribbon(k, 0, len(cell.cells) - 1),))
        # Coordinates of one axis are always alike, but parts need not be: so the picture names equal parts.
        alike = f" ({', '.join(band.cells[n].name for n in others)} alike)" if others and band.axis == "part" else ""
        around = () if band.axis == "allocation" else path
        _open(cell, (*around, cell.name + alike), rows, inside=band.runs == 1)


def _caption(band: Band) -> tuple[str, str]:
    """Return the axis and the number of the bands inside, and the bytes of each."""
    each = next(cell for cell in band.cells if not cell.gap)
    axis = "dim" if band.axis == "byte" else band.axis
    what = axis or "bytes"
    if band.axis == "part":
        what = " and ".join(band.parts) if band.count <= 3 else f"{band.count} parts"
    elif band.step is not None or band.axis == "allocation":
        what = f"{axis} x {band.count:,}"
    if band.axis == "allocation":
        return what, f"{nbytes_text(each.content)} of the block in each"
    if band.step is None:
        return what, nbytes_text(band.content)
    spaced = "no gaps" if band.step == each.nbytes else f"{nbytes_text(band.step)} apart"
    return what, f"{nbytes_text(each.content)} each, {spaced}"


# ---- from addresses to bands -----------------------------------------------------------------------------------------


def _axes(component: Component) -> list[tuple[str, Factors]]:
    """Return the axes inside a block of a component; the bytes of a row that lie together are no factor."""
    form = component.form
    dim = form.dim[:-1] if form.dim and form.dim[-1][1] == 1 else form.dim
    return [("subblock" if form.opaque else "token", form.token), ("head", form.head), ("byte", dim)]


def _pieces(layout: Built, block: int) -> Pieces:
    """Return the contiguous pieces of a block, in order of address: of each row the bytes that lie together."""
    tables: list[Pieces] = []
    for component in layout.components:
        axes = _axes(component)
        pieces = np.zeros([extent(factors) for _, factors in axes], PIECE)
        if len(layout.components) * pieces.size > MOST:
            raise LayoutError(f"too many runs to draw: {pieces.size:,} in a block of {component}")
        offsets = np.ix_(*(offsets_of(factors) for _, factors in axes))
        pieces["start"] = component.address + component.form.block_offset(block) + sum(offsets)
        pieces["nbytes"] = extent(component.form.dim) // pieces.shape[-1]
        for (axis, _), index in zip(axes, np.indices(pieces.shape), strict=True):
            pieces[axis] = index
        pieces["head"] += component.form.head_start
        pieces["byte"] *= pieces["nbytes"]
        pieces["layer"], pieces["part"] = component.layer, layout.parts.index(component.part)
        tables.append(pieces.ravel())
    joined = np.concatenate(tables)
    return joined[np.argsort(joined["start"], kind="stable")]


class _Nest:
    """What makes bands of pieces: of the fewest groups into which an axis divides them, in order of address."""

    def __init__(self, layout: Built) -> None:
        self.layout, self.known = layout, dict[object, Band]()
        factors = [axis for component in layout.components for axis in _axes(component)]
        places = {(axis, prod(n for n, _ in some[k + 1 :])) for axis, some in factors for k in range(len(some))}
        self.axes = [("layer", 1), ("part", 1), ("head", 1), *sorted(places)]

    def kinds(self, pieces: Pieces) -> list[Band]:
        """Return a band for each kind of allocation, which stands for one or for several."""
        memory = stretches_of(self.layout.regions)
        number = np.searchsorted([stretch.start for stretch in memory], pieces["start"], "right")
        kinds: dict[object, list[tuple[Band, Pieces]]] = {}
        for mine in np.split(pieces, np.flatnonzero(np.diff(number)) + 1):
            band = self.band(mine)
            end = next(stretch.stop for stretch in memory if band.start in stretch)
            padding = [gap for gap in self.gaps(band.stop, end) if gap.fill == bands.PADDING][:1]
            cells = (*(band.cells or (replace(band, name=band.fill),)), *padding)
            nbytes = band.nbytes + sum(gap.nbytes for gap in padding)
            band = replace(band, name=self.layers(band, mine), nbytes=nbytes, cells=cells)
            kinds.setdefault(band.kind, []).append((band, mine))
        several = []
        for alike in kinds.values():
            each, held = zip(*alike, strict=True)
            band = each[0] if len(each) == 1 else _row("allocation", each, lambda *_: ALLOCATIONS)
            several.append(replace(band, name=self.layers(band, np.concatenate(held))))
        return several

    def layers(self, band: Band, pieces: Pieces) -> str:
        """Return the layers of an allocation, and its part, if it has one of several."""
        return self.name("layer", pieces) + f" {band.parts[0]}" * (len(band.parts) == 1 < len(self.layout.parts))

    def name(self, axis: str, pieces: Pieces) -> str:
        """Return the coordinates of some pieces in words."""
        if axis == "part":
            return str(self.layout.parts[pieces["part"][0]])
        last = pieces[axis].max() + (pieces["nbytes"][-1] - 1 if axis == "byte" else 0)
        numbers = np.unique(pieces[axis]) if axis == "layer" else np.arange(pieces[axis].min(), last + 1)
        return f"{axis}{'s' * (len(numbers) > 1)} {number_ranges(numbers.tolist(), ',')}"

    def band(self, pieces: Pieces) -> Band:
        """Return the band of all bytes of some pieces; those that lie alike are looked at once."""
        start = int(pieces["start"][0])
        alike = ((pieces["start"] - start).tobytes(), pieces["nbytes"].tobytes(), pieces["part"].tobytes())
        if alike not in self.known:
            self.known[alike] = self.divided(pieces)
        return replace(self.known[alike], start=start)

    def divided(self, pieces: Pieces) -> Band:
        """Return the band of pieces; neighbours in a group that are equal and evenly spaced are a band, too."""
        ways = []
        for axis, place in self.axes:
            values = (pieces[axis] - pieces[axis].min()) // place
            cuts = np.flatnonzero(np.diff(values)) + 1
            if 0 < len(cuts) == len(np.unique(values)) - 1:
                ways.append((len(cuts), axis, cuts))
        if not ways:  # one piece; or those that interleave in no order of axes are drawn as one band
            runs, last = len(merge_ranges(pieces["start"], pieces["nbytes"])[0]), pieces[-1]
            fill = self.layout.parts[last["part"]] if len(pieces) == 1 else bands.MIXED
            nbytes, content = int(last["start"] + last["nbytes"] - pieces["start"][0]), int(pieces["nbytes"].sum())
            return Band("", nbytes, fill, content, runs=runs)
        _, axis, cuts = min(ways, key=lambda way: way[0])
        every = [replace(self.band(some), name=self.name(axis, some)) for some in np.split(pieces, cuts)]
        edges, rows, first = [0, *cuts.tolist(), len(pieces)], list[Band](), 0
        while first < len(every):
            stop = first + 1 if axis == "part" else first + _even(every[first:])
            row = every[first]
            if stop - first > 1:
                name = self.name(axis, pieces[edges[first] : edges[stop]])
                row = replace(_row(axis, every[first:stop], self.gaps), name=name)
            rows.append(row)
            first = stop
        return rows[0] if len(rows) == 1 else _row(axis, rows, self.gaps)

    def gaps(self, start: int, stop: int) -> tuple[Band, ...]:
        """Divide the bytes between two addresses into padding, and content of other blocks."""
        try:
            following = (first_from(component, start) for component in self.layout.components)
            content = min(min((at for at in following if at is not None), default=stop), stop)
        except KVPlanError:  # strides interleave in too many ways
            content = start
        lengths = ((bands.PADDING, content - start), (bands.OTHERS, stop - content))
        return tuple(Band(name, nbytes, name) for name, nbytes in lengths if nbytes > 0)


def _even(every: Sequence[Band]) -> int:
    """Return the number of bands from the first on that are of its kind, and evenly spaced."""
    steps = [b.start - a.start for a, b in pairwise(every)]
    kinds = [band.kind == every[0].kind for band in every[1:]]
    return 1 + sum(1 for _ in takewhile(all, zip(kinds, (step == steps[0] for step in steps), strict=True)))


def _row(axis: str, every: Sequence[Band], gaps: Gaps) -> Band:
    """Return the band of some bands in order of address; those of allocations are alike."""
    count, first, last = len(every), every[0], every[-1]
    steps = {b.start - a.start for a, b in pairwise(every)}
    step = steps.pop() if axis != "allocation" and len(steps) == len({band.shape for band in every}) == 1 else None
    alike = axis == "allocation" or (step is not None and axis != "part" and len({band.kind for band in every}) == 1)
    apart = gaps(first.stop, every[1].start) if count > 1 else ()
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


def _left_out(left_out: Sequence[Band], apart: Iterable[Band]) -> Band:
    """Return a pale band for some bands, with three examples."""
    like, alike = left_out[0], len({band.kind for band in left_out}) == 1
    name = f"{len(left_out):,} {'more' if alike else 'others'}"
    nbytes, content = left_out[-1].stop - like.start, sum(band.content for band in left_out)
    cells = (like, *apart, like, *apart, like)
    return Band(name, nbytes, like.fill, content, cells, count=len(left_out), pale=True, start=like.start)
