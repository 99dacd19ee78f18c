"""The model of every picture: rows of bands, which hold bands, and ribbons between rows.

:mod:`kvplan.draw.block` and :mod:`kvplan.draw.copies` make pictures of integers and names; :mod:`kvplan.draw.svg` and
:mod:`kvplan.draw.text` draw them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import log2
from typing import NamedTuple

from kvplan.base.numbers import count_of, nbytes_text, rounded

# Fills that are no part. A space has no bytes: its length is in pixels.
PADDING, OTHERS, MIXED, LEFT_OUT, SPACE = "padding", "other blocks", "mixed", "left out", "space"
GAPS = (PADDING, OTHERS, SPACE)
NEAR, APART = 4, 14  # pixels between bands of one allocation or rank, and between allocations or ranks
RUN, ALLOCATION = "one contiguous run", "one allocation"  # marks of a legend
# Okabe and Ito's colours, which differ for colour-blind readers. In grey print, lightness and patterns differ.
NAMED_FILLS = {"k": ("#0072b2", 0), "v": ("#e69f00", 1), "kv": ("#56b4e9", 0)}
COLOURS = ("#009e73", "#cc79a7", "#d55e00", "#f0e442")
PATTERNS = 6
Fill = tuple[str, int]  # a colour, and the number of a pattern


def part_fills(parts: Sequence[str]) -> dict[str, Fill]:
    """Return the colour and the pattern of each part. K, V and latents always have the same.

    >>> part_fills(("k", "v", "k_scale"))["k_scale"]
    ('#009e73', 2)
    """
    others = [part for part in parts if part not in NAMED_FILLS]
    fills = {part: (COLOURS[k % len(COLOURS)], parts.index(part) % PATTERNS) for k, part in enumerate(others)}
    return {part: fills.get(part) or NAMED_FILLS[part] for part in parts}


@dataclass(frozen=True)
class Band:
    """Bytes from a first to a last one.

    Attributes:
        name: ``"layer 0"``, ``"k"``, ``"token 3"``.
        nbytes: bytes from the first to the last, gaps included.
        fill: the part that it holds, or one of the fills above.
        content: bytes of content, without gaps.
        cells: bands and gaps inside, in order of address; examples of the bands that it stands for.
        runs: number of contiguous runs inside.
        axis, count, step: axis and number of the bands inside, and bytes from each to the next, None if these differ.
        pale: whether it stands for ``count`` bands that are left out.
        title: the band in words, if they are not its name and bytes.
        start: the address of the first byte.
    """

    name: str
    nbytes: int
    fill: str
    content: int = 0
    cells: tuple[Band, ...] = ()
    runs: int = 1
    axis: str = ""
    count: int = 1
    step: int | None = None
    pale: bool = False
    title: str = ""
    start: int = 0

    @property
    def stop(self) -> int:
        """The address after the last byte."""
        return self.start + self.nbytes

    @property
    def gap(self) -> bool:
        """Whether it holds no content of this picture."""
        return self.fill in GAPS

    @property
    def solid(self) -> bool:
        """Whether it is one run, or a part of one."""
        return self.content == self.nbytes and not self.pale

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts inside, in order of address."""
        bands = self.cells or (self,)
        return tuple(dict.fromkeys(p for b in bands if not b.gap for p in (b.parts if b.cells else (b.fill,))))

    @property
    def shape(self) -> object:
        """A key that is equal for bands that differ only in names and parts."""
        return self.nbytes, self.gap and self.fill, self.axis, self.count, self.step, *(c.shape for c in self.cells)

    @property
    def kind(self) -> object:
        """A key that is equal for bands that differ only in names."""
        return self.shape, self.parts

    @property
    def labels(self) -> tuple[tuple[str, str], tuple[str, str]]:
        """Name and bytes, in full and in a shorter form.

        >>> Band("token 3", 516096, "k", 516096).labels
        (('token 3', '516,096 bytes'), ('tok 3', '504 KiB'))
        """
        if not self.name:
            return ("", ""), ("", "")
        nbytes = self.nbytes if self.gap else self.content
        brief = self.name.replace("token", "tok").replace("padding", "pad").replace("other blocks", "others")
        return (self.name, nbytes_text(nbytes)), (f"+{self.count:,}", "") if self.pale else (brief, rounded(nbytes))

    @property
    def words(self) -> str:
        """The band in one line, for tool tips and for who cannot see it."""
        if self.title or not self.name:
            return self.title
        apart = not (self.gap or self.pale or self.solid)
        return ": ".join(self.labels[0]) + f" in {count_of(self.runs, 'run')}, over {self.nbytes:,}" * apart


class Label(NamedTuple):
    """A text beside some bands of a row, by their indices."""

    first: int
    last: int
    text: str


class Line(NamedTuple):
    """Labels side by side; those of an axis are underlined, and its name stands at the left."""

    labels: tuple[Label, ...]
    axis: str = ""


class Ribbon(NamedTuple):
    """What joins a band to bands of the next row; without a fill it leads to the band's inside."""

    upper: int
    first: int
    last: int
    fill: str = ""


@dataclass(frozen=True)
class Row:
    """Bands side by side.

    Attributes:
        cells: the bands.
        caption: what the row shows, in bold; more on it; and a note at the other end.
        lines: lines of labels; by default the names and bytes of the bands.
        above: whether labels stand above the bands.
        outlined: whether each contiguous run has an outline.
        frames: first and last index of bands that one frame holds.
        ribbons: what leads to the next row.
    """

    cells: tuple[Band, ...]
    caption: tuple[str, str, str] = ("", "", "")
    lines: tuple[Line, ...] = ()
    above: bool = False
    outlined: bool = False
    frames: tuple[tuple[int, int], ...] = ()
    ribbons: tuple[Ribbon, ...] = ()


class Picture(NamedTuple):
    """A picture.

    Attributes:
        title: the picture in words, for who cannot see it.
        heading: lines of text; the first is in bold.
        fills: colour and pattern of each part.
        legend: what is explained: parts, gaps and marks.
        rows: what is drawn.
        apart: pixels between rows.
    """

    title: str
    heading: tuple[str, ...]
    fills: dict[str, Fill]
    legend: tuple[str, ...]
    rows: tuple[Row, ...]
    apart: int


class Fit(NamedTuple):
    """The widths of a row's bands, the labels that fit, and whether widths are in proportion to bytes."""

    widths: list[float]
    lines: tuple[Line, ...]
    exact: bool


def fit(row: Row, room: float, measure: Callable[[str], float], pixel: float = 1.0, *, grow: bool = False) -> Fit:
    """Divide a row among its bands: in proportion to bytes if all labels then fit, otherwise by the labels' widths.

    Args:
        row: the row.
        room: its width.
        measure: a function that returns the width of a label, with the space around it.
        pixel: the width of a pixel of a space.
        grow: whether the row may be wider, if no form of the labels fits.

    >>> tokens = tuple(Band(f"token {k}", 64, "k", 64) for k in range(2))
    >>> fit(Row(tokens), 60, lambda text: len(text) + 2).widths
    [30.0, 30.0]
    """
    cells = row.cells
    spaces = [cell.nbytes * pixel if cell.fill == SPACE else 0.0 for cell in cells]
    for lines in [row.lines] if row.lines else [_names(cells, form) for form in (0, 1)]:
        needs = [measure(cell.name) if cell.fill == LEFT_OUT else spaces[k] for k, cell in enumerate(cells)]
        for first, last, text in (label for line in lines for label in line.labels):
            columns = [k for k in range(first, last + 1) if not spaces[k]]
            for k in columns:
                needs[k] = max(needs[k], measure(text) / len(columns))
        if sum(needs) <= room:
            break
    else:
        room, needs = (sum(needs), needs) if grow else (room, [need * room / sum(needs) for need in needs])
    sizes = [0 if spaces[k] or cell.pale else cell.nbytes for k, cell in enumerate(cells)]
    rate = (room - sum(spaces)) / max(sum(sizes), 1)
    widths = [space or size * rate for space, size in zip(spaces, sizes, strict=True)]
    exact = all(width >= need for width, need in zip(widths, needs, strict=True))
    if not exact:
        weights = [0.0 if spaces[k] else log2(2 + cell.nbytes) for k, cell in enumerate(cells)]
        spare = (room - sum(needs)) / sum(weights)
        widths = [need + weight * spare for need, weight in zip(needs, weights, strict=True)]
    return Fit(widths, lines, exact)


def _names(cells: Sequence[Band], form: int) -> tuple[Line, ...]:
    texts = zip(*(cell.labels[form] for cell in cells), strict=True)
    return tuple(Line(tuple(Label(k, k, text) for k, text in enumerate(line))) for line in texts)


def leaves(band: Band, x: float, width: float, narrow: float) -> Iterator[tuple[Band, float, float, bool]]:
    """Yield what is drawn of a band: plain bands, each with its left edge, its width, and whether it is pale.

    Widths inside a band grow with the logarithm of bytes. A band without room for its inside, or whose inside looks
    like one piece, is drawn as one.
    """
    if width < narrow * len(band.cells) or not band.cells or (band.solid and band.fill != MIXED):
        yield band, x, width, band.pale
        return
    weights = [log2(2 + cell.nbytes) for cell in band.cells]
    for cell, weight in zip(band.cells, weights, strict=True):
        share = width * weight / sum(weights)
        for leaf, at, room, pale in leaves(cell, x, share, narrow):
            yield leaf, at, room, pale or band.pale
        x += share
