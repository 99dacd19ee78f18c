"""Write a picture as SVG: rows of bands from top to bottom, and ribbons between them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from itertools import accumulate
from textwrap import wrap

from kvplan.draw import bands
from kvplan.draw.bands import Band, Fill, Fit, Picture, Row

WIDTH, MARGIN, GUTTER = 960, 24, 88  # pixels: of the page, around it, and at the left for the names of axes
BAR, CAPTION, LINE = 28, 20, 15  # heights in pixels: of bands, of the text above them, and of a line of labels
NARROW = 3  # pixels: narrower bands have no inside
LETTER = 7.2  # pixels: the average width of a label's letter, rounded up
HEADING = 100  # letters of a line at the top
# Lines of a pattern of 8 x 8 pixels, over the colour.
PATTERNS = ("", "M0 4H8", "M4 0V8", "M0 0L8 8M-2 6L2 10M6 -2L10 2", "M0 4H8M4 0V8", "M0 8L8 0M-2 2L2 -2M6 10L10 6")
HATCHES = {bands.PADDING: PATTERNS[3] + PATTERNS[5], bands.OTHERS: PATTERNS[5]}
# Names begin with kvplan, because a style of an SVG inside a page applies to the whole page.
STYLE = (
    ".kvplan-picture{font:13px system-ui,-apple-system,'Segoe UI','DejaVu Sans',sans-serif;fill:#1b1b1b}"
    ".kvplan-head{font-size:15px;font-weight:600}.kvplan-bold{font-weight:600}.kvplan-label{font-size:12px}"
    ".kvplan-small{font-size:11px;fill:#4d4d4d}.kvplan-page{fill:#fff}.kvplan-back{fill:#f4f4f4}"
    ".kvplan-hatch{fill:none;stroke:#8a8a8a;stroke-width:1.2}.kvplan-cut{stroke:#fff;stroke-width:1.2}"
    ".kvplan-lines{fill:none;stroke:#000;stroke-opacity:.35;stroke-width:1.2}.kvplan-zoom{fill-opacity:.06}"
    ".kvplan-run{fill:none;stroke:#111;stroke-width:1.8}.kvplan-frame{fill:none;stroke:#999}"
    ".kvplan-left{fill:none;stroke:#999;stroke-dasharray:3 2}"
    "@media(prefers-color-scheme:dark){.kvplan-picture{fill:#f0f0f0}.kvplan-small{fill:#bdbdbd}"
    ".kvplan-page{fill:#161616}.kvplan-back{fill:#262626}.kvplan-cut{stroke:#161616}.kvplan-run{stroke:#fff}}"
)


def svg(picture: Picture) -> str:
    """Return a picture as SVG text, 960 pixels wide or more, for light and dark pages. It loads no other files.

    >>> from kvplan import KVLayout
    >>> from kvplan.draw.block import block_picture
    >>> layout = KVLayout.from_spec({"notation": "block token dim", "sizes": {"block": 4, "token": 16, "dim": 64}})
    >>> svg(block_picture(layout.built)).startswith("<svg xmlns=")
    True
    """
    gutter = GUTTER if any(line.axis for row in picture.rows for line in row.lines) else 0
    left = MARGIN + gutter
    room = float(WIDTH - MARGIN - left)
    for _ in range(2):  # all rows are as wide as the widest
        fits = [bands.fit(row, room, _label_width, grow=True) for row in picture.rows]
        room = max(room, *(sum(fit.widths) for fit in fits))
    width = left + room + MARGIN
    edges = [list(accumulate(fit.widths, initial=left)) for fit in fits]
    y, body = _top(picture)
    tops: list[float] = []
    for row, fit, at in zip(picture.rows, fits, edges, strict=True):
        labels = len(fit.lines) * LINE + 4
        tops.append(y + CAPTION * bool(row.caption[0]) + labels * row.above)
        body += _row(row, fit, at, y, tops[-1], picture.fills)
        y = tops[-1] + BAR + labels * (not row.above) + picture.apart
    between = enumerate(zip(picture.rows, tops[1:], strict=False))
    ribbons = [each for k, (row, head) in between
               for each in _ribbons(row, edges[k : k + 2], tops[k] + BAR, head, picture.fills)]  # fmt: skip
    height = y - picture.apart + MARGIN
    box = f'viewBox="0 0 {width:.7g} {height:.7g}" role="img"'
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" class="kvplan-picture" {box}>',
        f"<title>{escape(picture.title)}</title>",
        f"<desc>{escape(' '.join(_description(picture)))}</desc>",
        f"<style>{STYLE}</style>",
        f"<defs>{''.join(_patterns(picture.fills.values()))}</defs>",
        f'<rect class="kvplan-page" width="{width:.7g}" height="{height:.7g}"/>',
        *ribbons,
        *body,
        "</svg>\n",
    ])  # fmt: skip


def _description(picture: Picture) -> Iterator[str]:
    """Yield the picture in words, for who cannot see it."""
    yield f"{'; '.join(picture.heading)}."
    for row in picture.rows:
        words = "; ".join(cell.words for cell in row.cells if cell.words)
        if words:
            yield f"{''.join(row.caption[:2])}: {words}.".removeprefix(": ")


def _label_width(text: str) -> float:
    return len(text) * LETTER + 12 if text else 0.0


def _text(x: float, y: float, text: str, kind: str = "", anchor: str = "") -> str:
    more = (f' class="kvplan-{kind}"' if kind else "") + (f' text-anchor="{anchor}"' if anchor else "")
    return f'<text x="{x:.1f}" y="{y:.1f}"{more}>{escape(text, quote=False)}</text>'


def _rect(x: float, y: float, width: float, height: float, look: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height}" {look}/>'


def _top(picture: Picture) -> tuple[float, list[str]]:
    """Return the heading and the legend, and the height below them."""
    y, elements = 10.0, []
    for k, text in enumerate(picture.heading):
        for line in wrap(text, HEADING + 16 * bool(k), max_lines=3, placeholder=" …"):
            y += 22
            elements.append(_text(MARGIN, y, line, "" if k else "head"))
    x = float(WIDTH)
    for name in picture.legend:
        if x + 30 + _label_width(name) > WIDTH - MARGIN:
            x, y = float(MARGIN), y + 25
        elements += [_rect(x, y - 11, 24, 14, _look(name, picture.fills)), _text(x + 30, y, name, "label")]
        x += 40 + _label_width(name)
    return y + 22, elements


def _look(fill: str, fills: dict[str, Fill]) -> str:
    """Return the attributes of a rectangle with a fill, or of a mark."""
    if fill in fills:
        colour, pattern = fills[fill]
        return f'fill="url(#kvplan-{pattern}-{colour[1:]})"'
    if fill in HATCHES:
        return f'fill="url(#kvplan-{fill.partition(" ")[0]})"'
    marks = {bands.RUN: "run", bands.ALLOCATION: "frame", bands.LEFT_OUT: "left"}
    return f'class="kvplan-{marks[fill]}" rx="2"' if fill in marks else 'fill="#888"'


def _patterns(fills: Iterable[Fill]) -> Iterator[str]:
    tile = 'width="8" height="8" patternUnits="userSpaceOnUse"><rect width="8" height="8"'
    for colour, k in fills:
        lines = f'<path class="kvplan-lines" d="{PATTERNS[k]}"/>' if PATTERNS[k] else ""
        yield f'<pattern id="kvplan-{k}-{colour[1:]}" {tile} fill="{colour}"/>{lines}</pattern>'
    for name, path in HATCHES.items():
        lines = f'<path class="kvplan-hatch" d="{path}"/>'
        yield f'<pattern id="kvplan-{name.partition(" ")[0]}" {tile} class="kvplan-back"/>{lines}</pattern>'


def _row(row: Row, fit: Fit, edges: Sequence[float], y: float, top: float, fills: dict[str, Fill]) -> Iterator[str]:
    what, rest, note = row.caption
    if what:
        note = f"{note}, {'' if fit.exact else 'not '}to scale"
        room = int((edges[-1] - edges[0] - len(note) * 6.6 - 16) / 7.8) - len(what)
        rest = rest if len(rest) <= room else f"{rest[: room - 1]}…"
        yield (f'<text x="{edges[0]:.1f}" y="{y + 14:.1f}"><tspan class="kvplan-bold">{escape(what)}</tspan>'
               f"<tspan>{escape(rest)}</tspan></text>")  # fmt: skip
        yield _text(edges[-1], y + 14, note, "small", "end")
    for first, last in row.frames:
        left, right = edges[first] - 4, edges[last + 1] + 4
        yield _rect(left, top - 4, right - left, BAR + 8, _look(bands.ALLOCATION, fills))
    drawn = []
    for k, (cell, x, width) in enumerate(zip(row.cells, edges, fit.widths, strict=False)):
        parts = [leaf for leaf in bands.leaves(cell, x, width, NARROW) if leaf[0].fill != bands.SPACE]
        rects = [_leaf(*leaf, top, fills) for leaf in parts]
        yield f"<g><title>{escape(cell.words)}</title>{''.join(rects)}</g>" if cell.words else "".join(rects)
        if k and not cell.gap and not row.cells[k - 1].gap:
            yield f'<path class="kvplan-cut" d="M{x:.1f} {top}V{top + BAR}"/>'
        drawn += parts
    yield from _outlines(drawn, top) if row.outlined else ()
    yield from _labels(fit, edges, y + CAPTION * bool(what) if row.above else top + BAR + 4)


def _labels(fit: Fit, edges: Sequence[float], top: float) -> Iterator[str]:
    for n, line in enumerate(fit.lines):
        y = top + n * LINE + 10
        if line.axis:
            yield _text(MARGIN, y, line.axis, "small")
        for first, last, text in line.labels:
            left, right = edges[first], edges[last + 1]
            yield _text((left + right) / 2, y, text, "small" if n or line.axis else "label", "middle")
            if line.axis:
                yield f'<path class="kvplan-frame" d="M{left + 1:.1f} {y + 2.5}H{right - 1:.1f}"/>'


def _leaf(band: Band, x: float, width: float, pale: bool, top: float, fills: dict[str, Fill]) -> str:
    if band.fill == bands.LEFT_OUT:
        name = _text(x + width / 2, top + BAR / 2 + 4, band.name, "small", "middle")
        return _rect(x, top, width, BAR, _look(band.fill, fills)) + name
    rect = _rect(x + pale, top, width - 2 * pale, BAR, _look(band.fill, fills))
    return f'<g opacity=".4">{rect}</g>' if pale else rect


def _outlines(drawn: Sequence[tuple[Band, float, float, bool]], top: float) -> Iterator[str]:
    """Draw an outline around every contiguous run. Pieces that touch are one run."""
    runs: list[tuple[float, float, bool]] = []  # left edge, right edge, whether all of it is pale
    for band, x, width, pale in drawn:
        if not band.gap and (band.solid or band.pale):
            touching = bool(runs) and x - runs[-1][1] < 0.01
            left, _, before = runs.pop() if touching else (x, x, True)
            runs.append((left, x + width, pale and before))
    for left, right, pale in runs:
        rect = _rect(left + pale, top, right - left - 2 * pale, BAR, _look(bands.RUN, {}))
        yield f'<g opacity=".4">{rect}</g>' if pale else rect


def _ribbons(
    row: Row, edges: Sequence[Sequence[float]], foot: float, head: float, fills: dict[str, Fill]
) -> Iterator[str]:
    """Draw what leads from a row to the next one."""
    for upper, first, last, fill in row.ribbons:
        a, b, c, d = edges[0][upper], edges[0][upper + 1], edges[1][last + 1], edges[1][first]
        look = f'fill="{fills[fill][0]}" fill-opacity="0.22"' if fill else 'class="kvplan-zoom"'
        yield f'<polygon points="{a:.1f},{foot} {b:.1f},{foot} {c:.1f},{head} {d:.1f},{head}" {look}/>'


def text_html(words: str, picture: str) -> str:
    """Return text and a picture as HTML, without scripts or links."""
    return f'<div class="kvplan"><pre>{escape(words)}</pre>{picture}</div>'
