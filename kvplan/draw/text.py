"""Write a picture in characters, for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from textwrap import wrap
from typing import NamedTuple

from kvplan.draw import bands
from kvplan.draw.bands import Band, Fit, Picture, Row

NARROWEST = 40  # columns: in fewer columns, bands look the same
PIXELS = 7  # of a column


class Span(NamedTuple):
    """Characters of one kind: ``part`` is the name of a part, ``"gap"``, ``"bold"``, or empty."""

    text: str
    part: str = ""


Line = tuple[Span, ...]

# What stands for parts, for other parts, for gaps, between bands, and for what is left out.
NAMED = {"k": "█", "v": "▒", "kv": "▓"}
OTHERS = "▚▤▥▦"
GAPS = {bands.PADDING: "\N{BOX DRAWINGS LIGHT DIAGONAL CROSS}", bands.OTHERS: "·", bands.SPACE: " "}
CUT, DOTS = "│…"


def block_lines(picture: Picture, width: int = 80) -> list[Line]:
    """Draw a picture as lines of at most ``width`` characters; :func:`plain` turns these into text.

    Args:
        picture: made by :func:`kvplan.draw.block.block_picture`.
        width: columns; fewer than 40 count as 40.

    >>> from kvplan import KVLayout
    >>> from kvplan.draw.block import block_picture
    >>> layout = KVLayout.from_spec({"notation": "block token dim", "dtype": "uint8",
    ...                              "sizes": {"block": 4, "token": 4, "dim": 12}})
    >>> print(plain(block_lines(block_picture(layout.built), 40)))
    block 0: 48 bytes in one contiguous run
    ▓ kv
    <BLANKLINE>
    token x 4, 12 bytes each, no gaps; one
    run; to scale
    ▓▓▓▓▓▓▓▓▓▓│▓▓▓▓▓▓▓▓▓│▓▓▓▓▓▓▓▓▓│▓▓▓▓▓▓▓▓▓
    token 0    token 1   token 2   token 3
    12 bytes   12 bytes  12 bytes  12 bytes
    """
    width = max(width, NARROWEST)
    rest = [part for part in picture.parts if part not in NAMED]
    marks = {part: NAMED.get(part) or OTHERS[rest.index(part) % len(OTHERS)] for part in picture.parts} | GAPS
    lines: list[Line] = [(Span(line, "bold"),) for text in picture.heading[1:] for line in wrap(text, width)]
    left_out = any(cell.pale for row in picture.rows for cell in row.cells)
    legend = [(marks[name], name) for name in picture.legend if name in marks] + [(DOTS, "left out")] * left_out
    lines += _legend(legend, width)
    for row in picture.rows:
        fit = bands.fit(row, width, lambda text: len(text) + 2 if text else 0, 1 / PIXELS)
        what, rest_of_it, note = row.caption
        caption = f"{what}{rest_of_it}; {note}; {'' if fit.exact else 'not '}to scale"
        lines += [(), *((Span(line, "bold"),) for line in wrap(caption, width))]
        lines += _row(row, fit, marks)
    return lines


def plain(lines: Sequence[Line]) -> str:
    """Return lines as text without trailing spaces."""
    return "\n".join("".join(span.text for span in line).rstrip() for line in lines)


def _legend(entries: Sequence[tuple[str, str]], width: int) -> list[Line]:
    lines: list[list[Span]] = [[]]
    for mark, name in entries:
        if sum(len(span.text) for span in lines[-1]) + len(name) + 5 > width:
            lines.append([])
        part = "gap" if name in (bands.PADDING, bands.OTHERS, bands.LEFT_OUT) else name
        lines[-1] += [Span("   " if lines[-1] else ""), Span(mark, part), Span(f" {name}")]
    return [tuple(line) for line in lines]


def _row(row: Row, fit: Fit, marks: dict[str, str]) -> list[Line]:
    """Draw the bands of a row, and its labels below."""
    ends = [round(end) for end in accumulate(fit.widths, initial=0)]
    touching = [k > 0 and not cell.gap and not row.cells[k - 1].gap for k, cell in enumerate(row.cells)]
    bar: list[Span] = []
    for k, cell in enumerate(row.cells):
        spans = _paint(cell, ends[k], ends[k + 1], marks)
        # A line stands between bands that touch, in place of a character.
        bar += [Span(CUT), Span(spans[0].text[1:], spans[0].part), *spans[1:]] if touching[k] else spans
    lines: list[Line] = [tuple(bar)]
    for line in fit.lines:
        text = ""
        for first, last, label in line.labels:
            text = (
                text.ljust(ends[first] + touching[first])
                + label[: max(ends[last + 1] - ends[first] - touching[first] - 1, 0)]
            )
        lines.append((Span(text),))
    return lines


def _paint(cell: Band, start: int, end: int, marks: dict[str, str]) -> list[Span]:
    """Draw a band, and its inside as far as there is room."""
    if cell.pale and end - start > 4:
        edge = Span(DOTS * 2, "gap")
        return [edge, *_paint(cell.cells[0], start + 2, end - 2, marks), edge]
    spans = []
    for leaf, x, width, _ in bands.leaves(cell, start, end - start, 1):
        columns = round(x + width) - round(x)
        part = "gap" if leaf.gap or leaf.fill not in marks else leaf.fill
        spans.append(Span(marks.get(leaf.fill, DOTS) * columns, part))
    return spans
