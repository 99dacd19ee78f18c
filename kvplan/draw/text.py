"""Write a picture in characters, for a terminal."""

from __future__ import annotations

from itertools import accumulate
from textwrap import wrap

from kvplan.draw import bands
from kvplan.draw.bands import Band, Fit, Picture, Row

NARROWEST = 40  # columns: in fewer columns, bands look the same
PIXELS = 7  # of a column
# What stands for parts, for other parts, for gaps, between bands, and for what is left out.
MARKS = {"k": "█", "v": "▒", "kv": "▓", bands.PADDING: "\N{BOX DRAWINGS LIGHT DIAGONAL CROSS}", bands.OTHERS: "·",
         bands.SPACE: " "}  # fmt: skip
REST = "▚▤▥▦"
CUT, DOTS = "│…"


def block_lines(picture: Picture, width: int = 80) -> list[str]:
    """Draw a picture as lines of at most ``width`` characters.

    Args:
        picture: made by :func:`kvplan.draw.block.block_picture`.
        width: columns; fewer than 40 count as 40.

    >>> from kvplan import KVLayout
    >>> from kvplan.draw.block import block_picture
    >>> layout = KVLayout.from_spec({"notation": "block token dim", "dtype": "uint8",
    ...                              "sizes": {"block": 4, "token": 4, "dim": 12}})
    >>> print("\\n".join(block_lines(block_picture(layout.built), 40)))
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
    rest = [part for part in picture.fills if part not in MARKS]
    marks = MARKS | {part: REST[k % len(REST)] for k, part in enumerate(rest)}
    legend = [f"{marks[name]} {name}" for name in picture.legend if name in marks]
    legend += [f"{DOTS} left out"] * any(cell.pale for row in picture.rows for cell in row.cells)
    joined = "   ".join(entry.replace(" ", "\N{NO-BREAK SPACE}") for entry in legend)  # lines break between entries
    lines = [line for text in picture.heading[1:] for line in wrap(text, width)]
    lines += [line.replace("\N{NO-BREAK SPACE}", " ") for line in wrap(joined, width)]
    for row in picture.rows:
        fit = bands.fit(row, width, lambda text: len(text) + 2 if text else 0, 1 / PIXELS)
        what, more, note = row.caption
        lines += ["", *wrap(f"{what}{more}; {note}; {'' if fit.exact else 'not '}to scale", width)]
        lines += _row(row, fit, marks)
    return lines


def _row(row: Row, fit: Fit, marks: dict[str, str]) -> list[str]:
    """Draw the bands of a row, and its labels below."""
    ends = [round(end) for end in accumulate(fit.widths, initial=0)]
    touching = [k > 0 and not cell.gap and not row.cells[k - 1].gap for k, cell in enumerate(row.cells)]
    bar = ""
    for k, cell in enumerate(row.cells):
        # A line stands between bands that touch, in place of a character.
        bar += CUT * touching[k] + _paint(cell, ends[k], ends[k + 1], marks)[touching[k] :]
    lines = [bar]
    for line in fit.lines:
        text = ""
        for first, last, label in line.labels:
            start = ends[first] + touching[first]
            text = text.ljust(start) + label[: max(ends[last + 1] - start - 1, 0)]
        lines.append(text.rstrip())
    return lines


def _paint(cell: Band, start: int, end: int, marks: dict[str, str]) -> str:
    """Draw a band, and its inside as far as there is room."""
    if cell.pale and end - start > 4:
        return f"{DOTS * 2}{_paint(cell.cells[0], start + 2, end - 2, marks)}{DOTS * 2}"
    leaves = bands.leaves(cell, start, end - start, 1)
    return "".join(marks.get(leaf.fill, DOTS) * (round(x + width) - round(x)) for leaf, x, width, _ in leaves)
