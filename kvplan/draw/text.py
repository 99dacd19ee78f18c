"""Draw a block's bytes in characters, for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from textwrap import wrap
from typing import NamedTuple

from kvplan.draw.block import Band, BlockPicture, Cell, Fold
from kvplan.draw.content import Gap
from kvplan.draw.fitting import Fitted, divided, fitted, told_apart
from kvplan.draw.words import TIMES, caption, inside_run, place, scale, verdict

NARROWEST = 40  # columns: in fewer columns, cells look the same


class Span(NamedTuple):
    """Characters of one kind: ``part`` is the name of a part, ``"gap"``, ``"bold"``, or empty."""

    text: str
    part: str = ""


Line = tuple[Span, ...]


@dataclass(frozen=True)
class Characters:
    """The characters that a terminal can show."""

    named: dict[str, str]
    others: str
    padding: str
    between: str
    cut: str
    dots: str
    times: str


BLOCKS = Characters(
    {"k": "█", "v": "▒", "kv": "▓"}, "▚▤▥▦", "\N{BOX DRAWINGS LIGHT DIAGONAL CROSS}", "·", "│", "…", TIMES
)
ASCII = Characters({"k": "#", "v": "=", "kv": "@"}, "%+&$", "/", ".", "|", "~", "x")


def encodable(encoding: str | None) -> bool:
    """Return whether this encoding has the block characters.

    >>> encodable("utf-8"), encodable("latin-1"), encodable(None)
    (True, False, False)
    """
    try:
        "".join((*BLOCKS.named.values(), BLOCKS.others, BLOCKS.padding, "·│…")).encode(encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def block_lines(picture: BlockPicture, width: int = 80, *, ascii_only: bool = False) -> list[Line]:
    """Draw the picture as lines of at most ``width`` characters; :func:`plain` turns these into text.

    Args:
        picture: made by :func:`kvplan.draw.block.block_picture`.
        width: columns; fewer than 40 count as 40.
        ascii_only: whether to use only ASCII, without block characters.

    >>> from kvplan import KVLayout
    >>> from kvplan.draw.block import block_picture
    >>> layout = KVLayout.from_spec({"notation": "block token dim", "dtype": "uint8", "strides": [64, 16, 1],
    ...                              "sizes": {"block": 4, "token": 4, "dim": 12}})
    >>> print(plain(block_lines(block_picture(layout.built), 72, ascii_only=True)))
    block 0: 48 bytes in 4 runs of 12 bytes
    @ kv   / padding
    <BLANKLINE>
    token x 4, 12 bytes each, 16 bytes apart; 4 runs; not to scale
    @@@@@@@@@/////////@@@@@@@@@/////////@@@@@@@@@/////////@@@@@@@@@/////////
    token 0  padding  token 1  padding  token 2  padding  token 3  padding
    12 B     4 B      12 B     4 B      12 B     4 B      12 B     4 B
    """
    width = max(width, NARROWEST)
    chars = ASCII if ascii_only else BLOCKS
    fills = told_apart(picture.parts, chars.named, chars.others)
    lines: list[Line] = [(Span(line, "bold"),) for line in wrap(picture.headline, width)]
    lines += _legend(picture, fills, chars, width)
    rows = picture.rows()
    for row in rows:
        lines.append(())
        what, nbytes = caption(row)
        apart = 2 if row.band.axis == "allocation" else 0
        fit = fitted(row.band, width - apart * (len(row.band.cells) - 1), lambda label: max(map(len, label)) + 2)
        drawn = scale(row.band, proportional=fit.exact)
        text = f"{what}, {nbytes}; {verdict(row, inside=inside_run(rows, row))}; {drawn}"
        if row.path:
            text = f"{place(row)}: {text}"
        lines += [(Span(line.replace(TIMES, chars.times), "bold"),) for line in wrap(text, width)]
        lines += _row(row.band, fit, fills, chars, apart)
    return lines


def plain(lines: Sequence[Line]) -> str:
    """Return lines as text without trailing spaces."""
    return "\n".join("".join(span.text for span in line).rstrip() for line in lines)


def _legend(picture: BlockPicture, fills: dict[str, str], chars: Characters, width: int) -> list[Line]:
    entries = [(char, name, name) for name, char in fills.items()]
    entries += [(chars.padding if gap == "padding" else chars.between, gap, "gap") for gap in picture.gaps]
    if any(isinstance(cell, Fold) for row in picture.rows() for cell in row.band.cells):
        entries.append((chars.dots, "left out", "gap"))
    lines: list[Line] = []
    line: list[Span] = []
    used = 0
    for char, name, part in entries:
        if used and used + len(name) + 5 > width:
            lines.append(tuple(line))
            line, used = [], 0
        line += [Span("   " if used else ""), Span(char, part), Span(f" {name}")]
        used = sum(len(span.text) for span in line)
    return [*lines, tuple(line)]


def _row(band: Band, fit: Fitted, fills: dict[str, str], chars: Characters, apart: int) -> list[Line]:
    """Draw the bytes of a row, and two lines of labels below."""
    ends = [round(end) for end in accumulate(fit.widths)]
    bar: list[Span] = []
    names, sizes = "", ""
    between = " " * apart
    for k, (cell, label) in enumerate(zip(band.cells, fit.labels, strict=True)):
        columns = ends[k] - (ends[k - 1] if k else 0)
        shift = ""
        spans = _paint(cell, columns, fills, chars)
        if k and not apart and not isinstance(cell, Gap) and not isinstance(band.cells[k - 1], Gap):
            # Two bands touch: a line stands between them, in place of the first character.
            spans = [Span(chars.cut), Span(spans[0].text[1:], spans[0].part), *spans[1:]]
            shift = " "
        bar += [Span(between if k else ""), *spans]
        names += (between if k else "") + f"{shift}{label[0]}"[: columns - 1].ljust(columns)
        sizes += (between if k else "") + f"{shift}{label[1]}"[: columns - 1].ljust(columns)
    return [tuple(bar), (Span(names),), (Span(sizes),)]


def _paint(cell: Cell, columns: int, fills: dict[str, str], chars: Characters) -> list[Span]:
    """Draw a cell, and its inside as far as there is room."""
    if isinstance(cell, Gap):
        return [Span((chars.padding if cell.name == "padding" else chars.between) * columns, "gap")]
    if isinstance(cell, Fold):
        if columns <= 4:
            return _paint(cell.like, columns, fills, chars)
        dots = Span(chars.dots * 2, "gap")
        return [dots, *_paint(cell.like, columns - 4, fills, chars), dots]
    if len(cell.parts) == 1 and (cell.solid or columns < len(cell.cells)):
        return [Span(fills[cell.parts[0]] * columns, cell.parts[0])]
    if not cell.cells or columns < len(cell.cells):
        return [Span(chars.dots * columns, "gap")]
    ends = [0, *(round(end) for end in accumulate(divided(cell.cells, columns)))]
    return [
        span
        for inner, (start, end) in zip(cell.cells, pairwise(ends), strict=True)
        for span in _paint(inner, end - start, fills, chars)
    ]
