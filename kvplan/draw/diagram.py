"""A picture of a program: one unit's runs between source and destination, as SVG text."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from html import escape
from typing import NamedTuple

from kvplan.layout.address_ranges import merged
from kvplan.program.explain import run_times
from kvplan.program.program import Program, RunGroup

WIDTH, MARGIN = 960, 24
BAND, GAP, CAPTION = 28, 72, 20  # heights: a band of bytes, the space that runs cross, a line of text
MAX_DRAWN = 160  # runs of one group, evenly chosen where there are more
# Okabe and Ito's colours, told apart by the colour-blind.
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00")
STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#1b1b1b}.small{font-size:11px;fill:#555}"
    ".band{fill:#f2f2f2;stroke:#bbb}.page{fill:#fff}"
    "@media(prefers-color-scheme:dark){text{fill:#eee}.small{fill:#aaa}.band{fill:#2b2b2b;stroke:#666}.page{fill:#161616}}"
)


class _Drawn(NamedTuple):
    """A run on the page: offsets in each band, and bytes."""

    src: int
    dst: int
    nbytes: int


def diagram(program: Program, title: str, sides: tuple[str, str]) -> str:
    """SVG of one unit: the source's bytes above, the destination's below, and every run between them.

    Bands are drawn from the first to the last byte that the unit touches; where a unit is scattered over separate
    allocations, the empty stretches between are left out and each stretch is drawn at the scale of its bytes.

    Args:
        program: the run groups.
        title: of the picture, for a screen reader.
        sides: the source and the destination in words.
    """
    groups = program.groups
    height = 3 * CAPTION + MARGIN + len(groups) * (2 * BAND + GAP + 4 * CAPTION)
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
        f"<title>{escape(title, quote=False)}</title>",
        f"<style>{STYLE}</style>",
        f'<rect class="page" width="{WIDTH}" height="{height}"/>',
        _text(MARGIN, 24, sides[0]),
        _text(MARGIN, 24 + CAPTION, sides[1]),
    ]
    body = [line for number, group in enumerate(groups) for line in _group(group, number)]
    return "\n".join([*head, *body, "</svg>\n"])


def _group(group: RunGroup, number: int) -> Iterator[str]:
    top = 3 * CAPTION + number * (2 * BAND + GAP + 4 * CAPTION) + 8
    src, dst, size = group.offsets
    rows = [_Drawn(*row) for row in zip(src.tolist(), dst.tolist(), size.tolist(), strict=True)]
    bands = [_Band([(row[side], row.nbytes) for row in rows]) for side in (0, 1)]
    shown = rows[:: -(-len(rows) // MAX_DRAWN)]
    note = "" if len(shown) == len(rows) else f"; {len(shown)} of them drawn"
    sizes = sorted(row.nbytes for row in rows)
    yield _text(MARGIN, top + 12, f"{run_times(len(rows), sizes[0], sizes[-1])} a unit{note}")
    upper = top + 2 * CAPTION
    lower = upper + BAND + GAP
    for band, at, name in ((bands[0], upper, "source"), (bands[1], lower, "destination")):
        for start, width in band.boxes():
            yield f'<rect class="band" x="{start:.1f}" y="{at}" width="{width:.1f}" height="{BAND}"/>'
        count = len(band.stretches)
        apart = ", apart" if count > 1 else ", contiguous"
        caption = f"{name}: {run_times(count, band.shortest, band.longest)}{apart}"
        yield _text(MARGIN, at - 4 if at == upper else at + BAND + 14, caption, small=True)
    for k, row in enumerate(shown):
        colour = COLOURS[k % len(COLOURS)]
        a, b = bands[0].place(row.src, row.nbytes), bands[1].place(row.dst, row.nbytes)
        for (start, width), at in ((a, upper), (b, lower)):
            yield f'<rect x="{start:.1f}" y="{at}" width="{max(width, 0.6):.1f}" height="{BAND}" fill="{colour}"/>'
        corners = ((a[0], upper + BAND), (a[0] + a[1], upper + BAND), (b[0] + b[1], lower), (b[0], lower))
        points = " ".join(f"{x:.1f},{y}" for x, y in corners)
        yield f'<polygon points="{points}" fill="{colour}" fill-opacity="0.25"/>'


class _Band:
    """Bytes of one side on a line: contiguous stretches, to scale, with a small space between them."""

    def __init__(self, runs: Sequence[tuple[int, int]]) -> None:
        self.stretches = merged((start, start + nbytes) for start, nbytes in runs)
        self.shortest = min(end - start for start, end in self.stretches)
        self.longest = max(end - start for start, end in self.stretches)
        total = sum(end - start for start, end in self.stretches)
        inner = WIDTH - 2 * MARGIN
        spaces = len(self.stretches) - 1
        self._space = min(6.0, inner / 3 / spaces) if spaces else 0.0
        self._scale = (inner - self._space * spaces) / total
        self._left: list[float] = []
        at = float(MARGIN)
        for start, end in self.stretches:
            self._left.append(at)
            at += (end - start) * self._scale + self._space

    def boxes(self) -> Iterator[tuple[float, float]]:
        """Left edge and width of every stretch."""
        for left, (start, end) in zip(self._left, self.stretches, strict=True):
            yield left, (end - start) * self._scale

    def place(self, start: int, nbytes: int) -> tuple[float, float]:
        """Left edge and width of one run."""
        k = bisect_right(self.stretches, start, key=lambda stretch: stretch[0]) - 1
        return self._left[k] + (start - self.stretches[k][0]) * self._scale, nbytes * self._scale


def _text(x: float, y: float, text: str, *, small: bool = False) -> str:
    kind = ' class="small"' if small else ""
    return f'<text x="{x}" y="{y}"{kind}>{escape(text, quote=False)}</text>'
