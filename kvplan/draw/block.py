"""Describe one block of a layout as drawing data: nested bands, gaps between bands, and folds (bands left out).

The data is integers and names. :mod:`kvplan.draw.svg` and :mod:`kvplan.draw.text` draw it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from kvplan.base.integers import integer
from kvplan.base.numbers import between, nbytes_text
from kvplan.draw.content import Content, Gap
from kvplan.draw.nest import Item, Leaf, Node, Repeat, Tally, item_of, nest, parts_of, runs_of
from kvplan.errors import BlockIndexError
from kvplan.layout.components import Built
from kvplan.layout.padding import stretches_of

MAX_CELLS = 7  # bands and gaps per row; if there are more, bands are folded, so that every label has room


@dataclass(frozen=True)
class Band:
    """The bytes of one coordinate of an axis, or of one part, from the first to the last.

    Attributes:
        name: ``"layer 0"``, ``"k"``, ``"token 3"``.
        parts: names of the parts inside, in order of address.
        nbytes: bytes from the first to the last, gaps included.
        content: bytes of this block, gaps excluded.
        runs: number of maximal contiguous runs inside.
        axis: axis of the bands inside; empty if they belong to no axis, or if there are no bands.
        count: number of bands inside, folded bands included.
        stride: bytes from each band inside to the next; None if the strides differ or there is only one band.
        cells: bands, folds and gaps inside, in order of address; empty for plain bytes.
        alike: a key; bands that differ only in names have equal keys.
    """

    name: str
    parts: tuple[str, ...]
    nbytes: int
    content: int
    runs: int
    axis: str = ""
    count: int = 0
    stride: int | None = None
    cells: tuple[Cell, ...] = ()
    alike: object = None

    @property
    def solid(self) -> bool:
        """Return whether the band is one run, or a part of one run."""
        return self.nbytes == self.content

    @property
    def each(self) -> Band:
        """Return the first band inside."""
        return next(cell for cell in self.cells if isinstance(cell, Band))


@dataclass(frozen=True)
class Fold:
    """Bands that the picture leaves out.

    Attributes:
        count: number of bands.
        content: bytes of this block in these bands.
        like: the band that stands for these bands; if they differ, the first band.
        same: whether all these bands are equal to ``like``.
        gaps: the gaps after each band.
        touching: whether each band begins where the band before it ends.
    """

    count: int
    content: int
    like: Band
    same: bool = True
    gaps: tuple[Gap, ...] = ()
    touching: bool = False


Cell = Band | Gap | Fold


@dataclass(frozen=True)
class Zoom:
    """A row of the picture, which shows the inside of one band.

    Attributes:
        path: names of the bands around the row, the outermost first; empty for the whole block.
        band: the band whose inside is drawn.
        parent: index of the row in which this band is a cell, or None.
        others: names of other bands that look the same inside.
    """

    path: tuple[str, ...]
    band: Band
    parent: int | None
    others: tuple[str, ...]


@dataclass(frozen=True)
class BlockPicture:
    """The drawing data of one block.

    Attributes:
        notation: the layout's notation.
        block, num_blocks: the block's id, and the number of blocks.
        content: bytes of the block, padding excluded.
        runs: number of maximal contiguous runs; runs of two allocations are never joined.
        run_nbytes: bytes of the smallest and of the largest run.
        allocations: number of allocations with bytes of the block.
        parts: names of the parts, in the order of the layout.
        stretches: a band for each kind of allocation; it stands for one allocation or for several equal allocations.
        nodes: for each allocation, the address of the block's first byte, and the block's bytes as nested loops.
    """

    notation: str
    block: int
    num_blocks: int
    content: int
    runs: int
    run_nbytes: tuple[int, int]
    allocations: int
    parts: tuple[str, ...]
    stretches: tuple[Band, ...]
    nodes: tuple[tuple[int, Node], ...]

    @property
    def headline(self) -> str:
        """Return a description of the block in one line."""
        low, high = self.run_nbytes
        sizes = f"{between(low, high)} bytes"
        where = "" if self.allocations == 1 else f", in {self.allocations:,} allocations"
        if self.runs == 1:
            return f"block {self.block:,}: {nbytes_text(self.content)} in one contiguous run"
        return f"block {self.block:,}: {nbytes_text(self.content)} in {self.runs:,} runs of {sizes}{where}"

    @property
    def gaps(self) -> tuple[str, ...]:
        """Return the names of the gaps that are drawn, in a fixed order."""
        found = {cell.name for zoom in self.rows() for cell in zoom.band.cells if isinstance(cell, Gap)}
        return tuple(name for name in ("padding", "other blocks") if name in found)

    def rows(self) -> list[Zoom]:
        """Return the rows to draw. Each shows the inside of a band of an earlier row; of equal bands, only one."""
        rows: list[Zoom] = []
        for band in self.stretches:
            _open(rows, Zoom((), band, None, ()))
        return rows

    def each_run(self) -> Iterator[tuple[int, int]]:
        """Yield the address and bytes of every run, allocation by allocation, in order of address."""
        for address, node in self.nodes:
            at, size = -1, 0
            for start, nbytes in runs_of(node, address):
                if start == at + size:
                    size += nbytes
                    continue
                if size:
                    yield at, size
                at, size = start, nbytes
            yield at, size


def block_picture(layout: Built, block: int = 0) -> BlockPicture:
    """Return the bytes of one block of a layout, as nested bands.

    Args:
        layout: plain data of any layout.
        block: id of the block.

    Raises:
        BlockIndexError: the layout has no such block.

    >>> from kvplan import KVLayout
    >>> layout = KVLayout.from_spec({"notation": "layer: kv block token head dim", "dtype": "bf16",
    ...     "sizes": {"layer": 80, "block": 64, "token": 16, "head": 2, "dim": 128}})
    >>> picture = block_picture(layout.built)
    >>> picture.headline
    'block 0: 1,310,720 bytes in 160 runs of 8,192 bytes, in 80 allocations'
    >>> [row.band.axis for row in picture.rows()]
    ['allocation', 'part', 'token', 'head']
    """
    block = integer("block", block, right="it is a block id", error=BlockIndexError)
    if not 0 <= block < layout.num_blocks:
        raise BlockIndexError(f"block {block}; blocks are 0 to {layout.num_blocks - 1}")
    memory = stretches_of(layout.regions)
    begins = [stretch.start for stretch in memory]
    held: dict[int, list[Item]] = {}
    for component in layout.components:
        item = item_of(component, block)
        number = bisect_right(begins, item.address) - 1  # each component lies in one stretch
        held.setdefault(number, []).append(item)
    kinds: dict[object, list[tuple[int, int, Node, list[Item]]]] = {}
    for number, items in held.items():
        address, node = nest(items)
        kinds.setdefault(node.key, []).append((number, address, node, items))
    stretches = []
    for alike in kinds.values():
        number, address, node, items = alike[0]
        content = Content(layout, memory[number])
        band = _allocation(_called(items), node, address, content)
        if len(alike) > 1:
            band = _allocations(band, [_called(entry[3]) for entry in alike], node)
        stretches.append(band)
    nodes = tuple((address, node) for alike in kinds.values() for _, address, node, _ in alike)
    tally = nodes[0][1].tally
    for _, node in nodes[1:]:
        tally = tally.then(node.tally, touching=False)
    return BlockPicture(
        layout.notation, block, layout.num_blocks, layout.block_nbytes, tally.count, tally.sizes, len(nodes),
        layout.parts, tuple(stretches), nodes,
    )  # fmt: skip


# ---- bands -----------------------------------------------------------------------------------------------------------


def _called(items: Sequence[Item]) -> str:
    layers = sorted({item.layer for item in items})
    return f"layer {layers[0]}" if len(layers) == 1 else f"layers {layers[0]}-{layers[-1]}"


def _allocation(name: str, node: Node, address: int, content: Content) -> Band:
    """Return the band of one allocation, with the padding that follows the block in this allocation."""
    band = _band(name, node, address, content)
    inside = band.cells or (_band(parts_of(node)[0], node, address, content),)
    padding = content.padding_after(address + node.span)
    end = (Gap(padding, padding),) if padding else ()
    return replace(band, name=name, nbytes=band.nbytes + padding, count=band.count or 1, cells=(*inside, *end))


def _allocations(first: Band, names: Sequence[str], node: Node) -> Band:
    # If each part has its own allocation, the name needs the part too; the layer comes first.
    if len(first.parts) == 1 and len(set(names)) == len(names):
        names = [f"{name} {first.parts[0]}" for name in names]
    bands = [replace(first, name=name) for name in names]
    cells: tuple[Cell, ...] = tuple(bands)
    if len(bands) > 3:
        cells = (bands[0], Fold(len(bands) - 2, (len(bands) - 2) * first.content, bands[1]), bands[-1])
    count = len(bands)
    return Band("", first.parts, count * first.nbytes, count * node.content, count * first.runs, "allocation", count,
                None, cells)  # fmt: skip


def _band(name: str, node: Node, address: int, content: Content) -> Band:
    tally: Tally = node.tally
    common = (name, parts_of(node), node.span, node.content, tally.count)
    if isinstance(node, Leaf):
        return Band(*common, alike=node.likeness)
    if isinstance(node, Repeat):
        gaps = content.gaps(address + node.child.span, address + node.stride)
        fits = node.count + (node.count - 1) * len(gaps) <= MAX_CELLS and node.count <= 4
        shown = list(range(node.count)) if fits else [0, -1, node.count - 1]
        like = _band(node.names[0], node.child, address, content)
        cells: list[Cell] = []
        for k in shown:
            cells += gaps if cells else ()
            if k < 0:
                cells.append(Fold(node.count - 2, (node.count - 2) * like.content, like, gaps=gaps, touching=not gaps))
            else:
                cells.append(replace(like, name=node.names[k]))
        return Band(*common, node.axis, node.count, node.stride, tuple(cells), node.likeness)
    items = node.items
    few = len(items) <= 4
    shown = list(range(len(items))) if few else [0, 1, -1, len(items) - 1]
    row: list[Cell] = []
    end = 0
    for k in shown:
        if k < 0:
            left_out = [child for _, _, child in items[2:-1]]
            like = _band(items[2][1], items[2][2], address + items[2][0], content)
            row += content.gaps(address + end, address + items[2][0])
            same = len({child.key for child in left_out}) == 1
            row.append(Fold(len(left_out), sum(child.content for child in left_out), like, same))
            end = items[-2][0] + items[-2][2].span
            continue
        start, called, child = items[k]
        row += content.gaps(address + end, address + start)
        row.append(_band(called, child, address + start, content))
        end = start + child.span
    spaces = {b[0] - a[0] for a, b in pairwise(items)}
    even = len(spaces) == 1 and len({child.likeness for _, _, child in items}) == 1
    return Band(*common, node.axis, len(items), spaces.pop() if even else None, tuple(row), node.likeness)


def _open(rows: list[Zoom], row: Zoom) -> None:
    """Append a row, and the rows of each kind of band in this row."""
    rows.append(row)
    here = len(rows) - 1
    kinds: dict[object, list[Band]] = {}
    for cell in row.band.cells:
        if isinstance(cell, Band) and cell.cells:
            kinds.setdefault(cell.alike, []).append(cell)
    for alike in kinds.values():
        first = alike[0]
        # Coordinates of a loop are always alike, but parts need not be: so the picture names equal parts.
        others = tuple(band.name for band in alike[1:]) if row.band.axis == "part" else ()
        _open(rows, Zoom((*row.path, first.name), first, here, others))
