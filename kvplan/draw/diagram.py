"""Draw a program as SVG: the runs of one unit between source and destination, and what each of them holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from itertools import groupby
from operator import itemgetter
from textwrap import wrap
from typing import NamedTuple

from kvplan.base.numbers import count_of
from kvplan.draw.ribbons import BAND, MARGIN, WIDTH, document, text_at
from kvplan.draw.stripes import AXES, Left, Side, Stripe, Stripes
from kvplan.draw.svg import PATTERNS, colours
from kvplan.program.explain import run_times

CAPTION, ROW, GAP = 20, 16, 72  # heights in pixels: a line of text, a row of labels, the space that ribbons cross
GUTTER = 56  # pixels at the left, for the names of the axes
APART, FRAME = 4, 16  # pixels between runs that do not touch, and between allocations
LETTER, NARROW, WIDE = 6.2, 18, 160  # pixels: of a small letter, and of the narrowest and the widest stripe
LINE = 128  # letters of a line of text
STYLE = (
    ".frame{fill:none;stroke:#999}.left{fill:none;stroke:#999;stroke-dasharray:3 2}.axis{stroke:#999}"
    ".mark{stroke:#fff;stroke-width:1.6;fill:none}"
)


class _Box(NamedTuple):
    """The left edge and the width of an item, in pixels."""

    x: float
    width: float
    item: int | Left


def diagram(picture: Stripes, title: str, told: tuple[str, str], runs: tuple[int, int, int]) -> str:
    """Draw one unit as SVG text: the source above, the destination below, and ribbons between both.

    Each stripe is a run. The rows beside it name its layer, part, tokens and heads. A dashed box stands for runs that
    are left out, and a frame is one allocation. Widths are not to scale.

    Args:
        picture: the stripes, made by :func:`kvplan.draw.stripes.stripes_of`.
        title: title of the picture, for screen readers.
        told: the source and the destination in words.
        runs: number of runs a unit, bytes of the smallest and of the largest.
    """
    least = max((len(value) * LETTER + 4 for one in picture.stripes for value in one.values), default=0)
    boxes = [_boxes(side, least) for side in picture.sides]
    width = max([WIDTH, *(frames[-1][-1].x + frames[-1][-1].width + FRAME / 2 + MARGIN for frames in boxes)])
    parts = tuple(dict.fromkeys(part for one in picture.stripes for part in one.parts))
    fills = {part: f"kvplan-part-{k}" for k, part in enumerate(parts)}
    page = [_patterns(parts, fills)]
    y = float(MARGIN)
    for line in (*wrap(f"from {told[0]}", LINE), *wrap(f"to {told[1]}", LINE)):
        page.append(text_at(MARGIN, y, line))
        y += CAPTION
    for line in (*wrap(f"{run_times(*runs)} a unit; {_shown(picture)}", LINE),):
        page.append(text_at(MARGIN, y, line))
        y += CAPTION
    page += _legend(parts, fills, y)
    y += 2 * CAPTION
    tops = []
    for k, name in enumerate(("source", "destination")):
        rows = _rows(picture, boxes[k])
        caption, labels = _caption(name, picture.sides[k]), len(rows) * ROW
        if k == 0:
            page.append(text_at(MARGIN, y, caption, kind="small"))
            page += _labels(rows, y + 8)
            tops.append(y + 8 + labels + 6)
            y = tops[0] + BAND + GAP
        else:
            tops.append(y)
            page += _labels(rows, y + BAND + 8)
            page.append(text_at(MARGIN, y + BAND + labels + 24, caption, kind="small"))
            y += BAND + labels + 24
        page += _bar(picture, boxes[k], fills, tops[k])
    page += _ribbons(picture, boxes, tops, colours(parts))
    return document(title, y + MARGIN, page, width=width, style=STYLE)


def _shown(picture: Stripes) -> str:
    """Return in words which part of each axis is drawn.

    >>> stripe = Stripe(("0", "k", "0-15", "0-1", ""), ("k",), 8192, 0, 0)
    >>> side = Side(((0, Left(159, 1302528)),), frozenset(), (1, 8192, 8192), 1)
    >>> _shown(Stripes((stripe,), (side, side), (80, 2, 16, 2, 256)))
    'drawn: 1; left out: 159; layers 0 of 80; parts k of 2'
    """
    left = sum(item.runs for frame in picture.sides[0].items for item in frame if isinstance(item, Left))
    if not left:
        return "all drawn"
    words = [f"drawn: {len(picture.stripes)}; left out: {left:,}"]
    for k, axis in enumerate(AXES[:4]):
        values = list(dict.fromkeys(one.values[k] for one in picture.stripes if one.values[k]))
        held = len(values) if not any("-" in value or " " in value for value in values) else picture.counts[k]
        if held < picture.counts[k]:
            words.append(f"{axis}s {', '.join(values)} of {picture.counts[k]:,}")
    return "; ".join(words)


def _caption(name: str, side: Side) -> str:
    count, least, most = side.extents
    contiguous = "contiguous" if count == 1 else "apart"
    return f"{name}: {run_times(count, least, most)}, {contiguous}, in {count_of(side.allocations, 'allocation')}"


# ---- places ----------------------------------------------------------------------------------------------------------


def _boxes(side: Side, least: float) -> list[list[_Box]]:
    """Place the items of a side from left to right; return those of each frame."""
    items = [item for frame in side.items for item in frame]
    lefts = [_left_width(item) for item in items if isinstance(item, Left)]
    spaces = APART * len(items) + FRAME * len(side.items)
    room = WIDTH - 2 * MARGIN - GUTTER - sum(lefts) - spaces
    count = sum(not isinstance(item, Left) for item in items)
    each = max(NARROW, least, min(WIDE, room / max(count, 1)))
    x, frames = float(MARGIN + GUTTER + FRAME / 2), []
    for frame in side.items:
        boxes: list[_Box] = []
        for item in frame:
            x += APART if boxes and not (isinstance(item, int) and item in side.touches) else 0
            width = _left_width(item) if isinstance(item, Left) else each
            boxes.append(_Box(x, width, item))
            x += width
        frames.append(boxes)
        x += FRAME
    return frames


def _left_width(left: Left) -> float:
    return max(len(f"+{left.runs:,}") * LETTER + 8, 26.0)


class _Row(NamedTuple):
    """A row of labels: the axis, and (left edge, right edge, value) of stripes that share a value."""

    axis: str
    groups: list[tuple[float, float, str]]


def _rows(picture: Stripes, frames: Sequence[Sequence[_Box]]) -> list[_Row]:
    """Return the rows of labels of a side, the axis that changes most slowly first."""
    boxes = [box for frame in frames for box in frame]
    rows = []
    for k, axis in enumerate(AXES):
        named = [(picture.stripes[item].values[k], x, width) for x, width, item in boxes if isinstance(item, int)]
        groups: list[tuple[float, float, str]] = []
        for value, held in groupby(named, key=itemgetter(0)):
            some = list(held)
            groups.append((some[0][1], some[-1][1] + some[-1][2], value))
        if any(value for _, _, value in groups):
            rows.append(_Row(axis, groups))
    return sorted(rows, key=lambda row: len(row.groups))


# ---- elements --------------------------------------------------------------------------------------------------------


def _labels(rows: Sequence[_Row], top: float) -> Iterator[str]:
    for number, row in enumerate(rows):
        y = top + number * ROW + 11
        yield text_at(MARGIN, y, row.axis, kind="small")
        for left, right, value in row.groups:
            if value:
                yield f'<path class="axis" d="M{left + 1:.1f} {y + 2.5}H{right - 1:.1f}"/>'
                yield text_at((left + right) / 2, y, value, kind="small", anchor="middle")


def _bar(picture: Stripes, frames: Sequence[Sequence[_Box]], fills: dict[str, str], top: float) -> Iterator[str]:
    for boxes in frames:
        if any(isinstance(box.item, int) for box in boxes):
            left, right = boxes[0].x - 4, boxes[-1].x + boxes[-1].width + 4
            yield (f'<rect class="frame" x="{left:.1f}" y="{top - 4}" width="{right - left:.1f}" '
                   f'height="{BAND + 8}" rx="3"/>')  # fmt: skip
        for x, width, item in boxes:
            if isinstance(item, Left):
                told = f"{count_of(item.runs, 'run')} of {item.nbytes:,} bytes, left out"
                yield (f'<rect class="left" x="{x:.1f}" y="{top}" width="{width:.1f}" height="{BAND}">'
                       f"<title>{told}</title></rect>")  # fmt: skip
                yield text_at(x + width / 2, top + BAND / 2 + 4, f"+{item.runs:,}", kind="small", anchor="middle")
                continue
            one = picture.stripes[item]
            each = width / len(one.parts)
            for k, part in enumerate(one.parts):
                yield (f'<rect class="run" x="{x + k * each:.1f}" y="{top}" width="{each:.1f}" height="{BAND}" '
                       f'fill="url(#{fills[part]})"><title>{escape(_said(one))}</title></rect>')  # fmt: skip


def _said(one: Stripe) -> str:
    """Describe a stripe in one line.

    >>> _said(Stripe(("0", "k", "0-15", "0-1", ""), ("k",), 8192, 4096, 0))
    'layer 0, part k, token 0-15, head 0-1: 8,192 bytes from 0x1000 to 0x0'
    """
    names = ", ".join(f"{axis} {value}" for axis, value in zip(AXES, one.values, strict=True) if value)
    return f"{names}: {one.nbytes:,} bytes from {one.src:#x} to {one.dst:#x}"


def _ribbons(
    picture: Stripes, boxes: Sequence[Sequence[Sequence[_Box]]], tops: Sequence[float], tints: dict[str, str]
) -> Iterator[str]:
    upper, lower = ({box.item: box for frame in side for box in frame} for side in boxes)
    for k, one in enumerate(picture.stripes):
        a, b = upper[k], lower[k]
        foot, head = tops[0] + BAND + 4, tops[1] - 4
        points = f"{a.x:.1f},{foot} {a.x + a.width:.1f},{foot} {b.x + b.width:.1f},{head} {b.x:.1f},{head}"
        yield f'<polygon points="{points}" fill="{tints[one.parts[0]]}" fill-opacity="0.22"/>'


def _patterns(parts: Sequence[str], fills: dict[str, str]) -> str:
    tiles = []
    for k, (part, colour) in enumerate(colours(parts).items()):
        lines = PATTERNS[{"k": 0, "v": 1}.get(part, k % len(PATTERNS))]
        mark = f'<path class="mark" d="{lines}"/>' if lines else ""
        tiles.append(f'<pattern id="{fills[part]}" width="8" height="8" patternUnits="userSpaceOnUse">'
                     f'<rect width="8" height="8" fill="{colour}"/>{mark}</pattern>')  # fmt: skip
    return f"<defs>{''.join(tiles)}</defs>"


def _legend(parts: Sequence[str], fills: dict[str, str], y: float) -> Iterator[str]:
    x = float(MARGIN)
    entries = [(f'fill="url(#{fills[part]})"', part) for part in parts]
    entries += [('class="left"', "runs left out"), ('class="frame"', "one allocation")]
    for look, name in entries:
        yield f'<rect {look} x="{x:.1f}" y="{y - 11}" width="24" height="14"/>'
        yield text_at(x + 30, y, name, kind="small")
        x += 30 + len(name) * LETTER + 24
    yield text_at(x, y, "widths are not to scale; a space: bytes of others", kind="small")
