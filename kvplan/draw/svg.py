"""Draw a block's bytes as SVG: a row per axis, the outermost first; each row is the inside of a band above it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from itertools import pairwise
from typing import NamedTuple

from kvplan.draw.block import Band, BlockPicture, Cell, Fold, Zoom
from kvplan.draw.content import Gap
from kvplan.draw.fitting import divided, fitted, told_apart
from kvplan.draw.ribbons import text_at
from kvplan.draw.words import Label, caption, description, inside_run, place, scale, spoken, verdict

WIDTH, MARGIN = 960, 24
BAR, CAPTION, LABELS, BETWEEN = 28, 20, 34, 18  # heights in pixels: bar, line above it, labels, space to the next row
INNER = WIDTH - 2 * MARGIN
APART = 14  # pixels between allocations
TOUCHING = 0.01  # pixels: tolerance for rounding
NARROW = 3  # pixels: the inside of narrower cells is not drawn
EM = 0.6  # average width of a character as a share of the font's size, rounded up

# Okabe and Ito's colours, which differ for colour-blind readers. In grey print, lightness and patterns differ.
NAMED_COLOURS = {"k": "#0072b2", "v": "#e69f00", "kv": "#56b4e9"}
OTHER_COLOURS = ("#009e73", "#cc79a7", "#d55e00", "#f0e442")
# Lines of a pattern of 8 x 8 pixels, over the colour.
PATTERNS = ("", "M0 4H8", "M4 0V8", "M0 0L8 8M-2 6L2 10M6 -2L10 2", "M0 4H8M4 0V8", "M0 8L8 0M-2 2L2 -2M6 10L10 6")

_LIGHT = {
    "text": "fill:#1b1b1b", ".small": "fill:#4d4d4d", ".page": "fill:#fff", ".zoom": "fill:#000;fill-opacity:.06",
    ".hatch": "stroke:#8a8a8a", ".back": "fill:#f4f4f4", ".run": "stroke:#111", ".cut": "stroke:#fff",
}  # fmt: skip
_DARK = {
    "text": "fill:#f0f0f0", ".small": "fill:#bdbdbd", ".page": "fill:#161616", ".zoom": "fill:#fff;fill-opacity:.08",
    ".hatch": "stroke:#8f8f8f", ".back": "fill:#262626", ".run": "stroke:#fff", ".cut": "stroke:#161616",
}  # fmt: skip


def _rules(rules: dict[str, str]) -> str:
    # Every rule names this picture's class, because a style of an SVG inside a page applies to the whole page.
    return "".join(f".kvplan-block {name}{{{style}}}" for name, style in rules.items())


STYLE = (
    ".kvplan-block text{font:13px system-ui,-apple-system,'Segoe UI','DejaVu Sans',sans-serif}"
    ".kvplan-block .head{font-size:15px;font-weight:600}.kvplan-block .bold{font-weight:600}"
    ".kvplan-block .small{font-size:11px}.kvplan-block .label{font-size:12px}"
    ".kvplan-block .hatch{fill:none;stroke-width:1.2}"
    ".kvplan-block .run{fill:none;stroke-width:1.8}.kvplan-block .cut{stroke-width:1.2}"
    ".kvplan-block .pattern{stroke:#000;stroke-opacity:.35;stroke-width:1.2;fill:none}"
    f"{_rules(_LIGHT)}@media(prefers-color-scheme:dark){{{_rules(_DARK)}}}"
)


class Box(NamedTuple):
    """A cell on the page: its left edge and width in pixels, and the label below it."""

    cell: Cell
    x: float
    width: float
    label: Label


def block_svg(picture: BlockPicture) -> str:
    """Draw the picture as SVG text, 960 pixels wide, for light and dark pages. It loads no other files.

    >>> from kvplan import KVLayout
    >>> from kvplan.draw.block import block_picture
    >>> layout = KVLayout.from_spec({"notation": "block token dim", "sizes": {"block": 4, "token": 16, "dim": 64}})
    >>> block_svg(block_picture(layout.built)).startswith("<svg xmlns=")
    True
    """
    body = list(_body(picture))
    height = int(body.pop())
    title = f"Block {picture.block:,} of {picture.num_blocks:,}: {picture.notation}"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" class="kvplan-block" viewBox="0 0 {WIDTH} {height}" role="img">',
            f"<title>{escape(title)}</title>",
            f"<desc>{escape(description(picture))}</desc>",
            f"<style>{STYLE}</style>",
            f"<defs>{''.join(_patterns(picture.parts))}</defs>",
            f'<rect class="page" width="{WIDTH}" height="{height}"/>',
            *body,
            "</svg>\n",
        ]
    )


def colours(parts: Sequence[str]) -> dict[str, str]:
    """Return a colour for each part. K, V and latents always have the same colours.

    >>> colours(("k", "v", "k_scale"))
    {'k': '#0072b2', 'v': '#e69f00', 'k_scale': '#009e73'}
    """
    return told_apart(parts, NAMED_COLOURS, OTHER_COLOURS)


def text_width(text: str, size: int) -> float:
    """Return the maximum width of a text, in pixels."""
    return len(text) * size * EM


# ---- the page --------------------------------------------------------------------------------------------------------


def _body(picture: BlockPicture) -> Iterator[str]:
    """Yield the elements from top to bottom, and at last the height of the page."""
    fills = {part: f"url(#kvplan-{k}-{colour[1:]})" for k, (part, colour) in _told_apart(picture.parts)}
    yield text_at(MARGIN, 30, _clipped(picture.notation, INNER, 15), kind="head")
    yield text_at(MARGIN, 52, _clipped(picture.headline, INNER, 13))
    top = 78
    x = float(MARGIN)
    for name, fill in [*fills.items(), *((gap, "") for gap in picture.gaps), ("one contiguous run", "run")]:
        width = 30 + text_width(name, 12) + 22
        if x + width > WIDTH - MARGIN:
            x, top = float(MARGIN), top + 24
        yield from _legend(x, top - 11, name, fill)
        yield text_at(x + 30, top, name, kind="label")
        x += width
    rows, at, drawn = picture.rows(), top + 22, list[list[Box]]()
    for number, row in enumerate(rows):
        boxes = _boxes(row.band)
        if row.parent is not None and row.parent == number - 1:
            yield _zoom(drawn[row.parent], row.band, at)
        drawn.append(boxes)
        yield from _row(row, boxes, at, fills, inside=inside_run(rows, row))
        at += CAPTION + BAR + LABELS + BETWEEN
    yield str(at)


def _row(row: Zoom, boxes: Sequence[Box], top: int, fills: dict[str, str], *, inside: bool) -> Iterator[str]:
    what, nbytes = caption(row)
    note = f"{verdict(row, inside=inside)} · {scale(row.band, proportional=_proportional(boxes))}"
    left = INNER - text_width(note, 11) - 16
    rest = f" · {nbytes}" + (f" · {place(row)}" if row.path else "")
    rest = _clipped(rest, left - text_width(what, 13), 13)
    yield (
        f'<text x="{MARGIN}" y="{top + 14}"><tspan class="bold">{escape(what)}</tspan>'
        f"<tspan>{escape(rest)}</tspan></text>"
    )
    yield text_at(WIDTH - MARGIN, top + 14, note, kind="small", anchor="end")
    bar = top + CAPTION
    for box in boxes:
        yield f"<g><title>{escape(spoken(box.cell))}</title>"
        yield from _paint(box.cell, box.x, box.width, bar, fills)
        yield "</g>"
    touching = [(a, b) for a, b in pairwise(boxes) if not isinstance(a.cell, Gap) and not isinstance(b.cell, Gap)]
    if row.band.axis != "allocation":
        for _, b in touching:
            yield f'<line class="cut" x1="{b.x:.1f}" y1="{bar}" x2="{b.x:.1f}" y2="{bar + BAR}"/>'
    if not inside:
        for x, width in _runs(boxes):
            yield _outline(x, width, bar)
    for box in boxes:
        name, size = box.label
        middle = box.x + box.width / 2
        yield text_at(middle, bar + BAR + 14, name, kind="label", anchor="middle")
        if size:
            yield text_at(middle, bar + BAR + 28, size, kind="small", anchor="middle")


def _runs(boxes: Sequence[Box]) -> Iterator[tuple[float, float]]:
    """Yield the left edge and the width of every run, in pixels. Pieces that touch are one run."""
    start = end = -1.0
    for box in boxes:
        for x, width in _solid(box.cell, box.x, box.width):
            if x - end < TOUCHING:
                end = x + width
                continue
            if end > start:
                yield start, end - start
            start, end = x, x + width
    if end > start:
        yield start, end - start


def _solid(cell: Cell, x: float, width: float) -> Iterator[tuple[float, float]]:
    """Yield the left edge and the width of each contiguous piece of a cell, without joining pieces that touch."""
    if isinstance(cell, Fold):
        if cell.like.solid and cell.touching:
            yield x, width
    elif isinstance(cell, Band) and cell.solid:
        yield x, width
    elif isinstance(cell, Band) and width >= NARROW:
        for inner, at, room in _inside(cell, x, width):
            yield from _solid(inner, at, room)


def _inside(band: Band, x: float, width: float) -> Iterator[tuple[Cell, float, float]]:
    """Yield the cells of a band that is drawn small, each with its left edge and a width that grows with its bytes."""
    for cell, room in zip(band.cells, divided(band.cells, width), strict=True):
        yield cell, x, room
        x += room


def _zoom(above: Sequence[Box], band: Band, top: int) -> str:
    """Draw a faint wedge from a band to the row that shows its inside."""
    box = next(box for box in above if isinstance(box.cell, Band) and box.cell.alike == band.alike)
    upper, lower = top - BETWEEN - LABELS, top + CAPTION
    points = ((box.x, upper), (box.x + box.width, upper), (WIDTH - MARGIN, lower), (MARGIN, lower))
    return f'<polygon class="zoom" points="{" ".join(f"{x:.1f},{y}" for x, y in points)}"/>'


# ---- widths ----------------------------------------------------------------------------------------------------------


def _boxes(band: Band) -> list[Box]:
    """Place the cells of a band side by side, with their labels."""
    apart = APART if band.axis == "allocation" else 0
    fit = fitted(band, INNER - apart * (len(band.cells) - 1),
                 lambda label: max(text_width(label[0], 12), text_width(label[1], 11)) + 12)  # fmt: skip
    boxes, x = [], float(MARGIN)
    for cell, width, (name, size) in zip(band.cells, fit.widths, fit.labels, strict=True):
        boxes.append(Box(cell, x, width, (_clipped(name, width, 12), _clipped(size, width, 11))))
        x += width + apart
    return boxes


def _proportional(boxes: Sequence[Box]) -> bool:
    rates = [box.cell.nbytes / box.width for box in boxes if not isinstance(box.cell, Fold)]
    return max(rates) < 1.01 * min(rates)


# ---- paint -----------------------------------------------------------------------------------------------------------


def _paint(cell: Cell, x: float, width: float, top: int, fills: dict[str, str]) -> Iterator[str]:
    """Draw a cell, and its inside as far as it is visible."""
    if isinstance(cell, Gap):
        yield _rect(x, top, width, 'class="back"')
        yield _rect(x, top, width, f'fill="url(#kvplan-{cell.name.partition(" ")[0]})"')
        return
    if isinstance(cell, Fold):
        # Three paler bands stand for the folded bands, which are too many to draw.
        kinds: tuple[Cell, ...] = (cell.like, *cell.gaps)
        strip = (*kinds * 2, cell.like)
        weights = [0.4 if isinstance(inner, Gap) else 1.0 for inner in strip]
        scale = width / sum(weights)
        yield '<g opacity=".4">'
        for inner, weight in zip(strip, weights, strict=True):
            yield from _paint(inner, x + 1, weight * scale - 2, top, fills)
            if not (cell.touching and cell.like.solid) and isinstance(inner, Band):
                # Outlined alone: its neighbours in the picture are not its neighbours in memory.
                alone = Box(inner, x + 1, weight * scale - 2, ("", ""))
                yield from (_outline(at, room, top) for at, room in _runs([alone]))
            x += weight * scale
        yield "</g>"
        return
    if len(cell.parts) == 1 and (cell.solid or not cell.cells or width < NARROW):
        yield _rect(x, top, width, f'fill="{fills[cell.parts[0]]}"')
        return
    if width < NARROW or not cell.cells:
        yield _rect(x, top, width, 'fill="#888"')
        return
    for inner, at, room in _inside(cell, x, width):
        yield from _paint(inner, at, room, top, fills)


def _legend(x: float, top: float, name: str, fill: str) -> Iterator[str]:
    if fill == "run":
        yield f'<rect class="run" x="{x + 1:.1f}" y="{top}" width="22" height="14" rx="2"/>'
        return
    if not fill:
        yield f'<rect class="back" x="{x:.1f}" y="{top}" width="24" height="14"/>'
    fill = fill or f"url(#kvplan-{name.partition(' ')[0]})"
    yield f'<rect x="{x:.1f}" y="{top}" width="24" height="14" fill="{fill}"/>'


def _told_apart(parts: Sequence[str]) -> Iterator[tuple[int, tuple[str, str]]]:
    """Yield the number of the pattern, the name and the colour of each part."""
    for k, (part, colour) in enumerate(colours(parts).items()):
        fixed = {"k": 0, "v": 1}.get(part)
        yield (k % len(PATTERNS) if fixed is None else fixed), (part, colour)


def _patterns(parts: Sequence[str]) -> Iterator[str]:
    tile = 'width="8" height="8" patternUnits="userSpaceOnUse"'
    for k, (_, colour) in _told_apart(parts):
        lines = f'<path class="pattern" d="{PATTERNS[k]}"/>' if PATTERNS[k] else ""
        fill = f'<rect width="8" height="8" fill="{colour}"/>'
        yield f'<pattern id="kvplan-{k}-{colour[1:]}" {tile}>{fill}{lines}</pattern>'
    yield f'<pattern id="kvplan-padding" {tile}><path class="hatch" d="{PATTERNS[3]}{PATTERNS[5]}"/></pattern>'
    yield f'<pattern id="kvplan-other" {tile}><path class="hatch" d="{PATTERNS[5]}"/></pattern>'


def _rect(x: float, top: int, width: float, rest: str) -> str:
    return f'<rect x="{x:.1f}" y="{top}" width="{width:.1f}" height="{BAR}" {rest}/>'


def _outline(x: float, width: float, top: int) -> str:
    return f'<rect class="run" x="{x:.1f}" y="{top}" width="{width:.1f}" height="{BAR}" rx="2"/>'


def _clipped(text: str, width: float, size: int) -> str:
    room = max(int(width / (size * EM)), 1)
    return text if len(text) <= room else text[: room - 1] + "…"
