"""Draw the bytes of two sides as lines, and copies as ribbons between the lines; for programs and for ranks."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from html import escape

from kvplan.layout.address_ranges import merged

WIDTH, MARGIN, BAND = 960, 24, 30  # pixels: of a picture, around it, and the height of a line of bytes
# Okabe and Ito's colours, which differ for colour-blind readers.
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00")
STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#1b1b1b}.small{font-size:11px;fill:#555}"
    ".band{fill:#f2f2f2;stroke:#bbb}.page{fill:#fff}"
    "@media(prefers-color-scheme:dark){text{fill:#eee}.small{fill:#aaa}.band{fill:#2b2b2b;stroke:#666}.page{fill:#161616}}"
)


class Line:
    """A line of byte ranges from left to right, to scale. A small space separates ranges that do not touch.

    Args:
        ranges: first byte and end of each range, in any order; ranges that touch become one.
        left, top: position of the line, in pixels.
        width: width of the line, in pixels.

    >>> line = Line([(0, 8), (100, 108), (8, 16)], left=24, top=0, width=100)
    >>> line.ranges, line.place(100, 4)
    ([(0, 16), (100, 108)], (92.0, 16.0))
    """

    def __init__(self, ranges: Iterable[tuple[int, int]], left: float, top: float, width: float) -> None:
        self.ranges = merged(ranges)
        self.left, self.top = left, top
        spaces = max(len(self.ranges) - 1, 0)
        space = min(4.0, width / 4 / spaces) if spaces else 0.0
        self._scale = (width - space * spaces) / max(sum(end - start for start, end in self.ranges), 1)
        self._starts: list[float] = []
        for start, end in self.ranges:
            self._starts.append(left)
            left += (end - start) * self._scale + space
        self._boxes = [self.place(start, end - start) for start, end in self.ranges] or [(self.left, width)]

    def place(self, start: int, nbytes: int) -> tuple[float, float]:
        """Return the left edge and the width, in pixels, of some bytes of one range."""
        k = bisect_right(self.ranges, start, key=lambda held: held[0]) - 1
        return self._starts[k] + (start - self.ranges[k][0]) * self._scale, nbytes * self._scale

    def bands(self) -> Iterator[str]:
        """Draw the ranges as boxes. A line without bytes is one empty box."""
        for left, width in self._boxes:
            yield f'<rect class="band" x="{left:.1f}" y="{self.top}" width="{width:.1f}" height="{BAND}"/>'


def ribbon(upper: Line, lower: Line, src: int, dst: int, nbytes: int, colour: str) -> Iterator[str]:
    """Draw one copy: its bytes on both lines, and a ribbon between them."""
    a, b = upper.place(src, nbytes), lower.place(dst, nbytes)
    for (start, width), line in ((a, upper), (b, lower)):
        yield f'<rect x="{start:.1f}" y="{line.top}" width="{max(width, 0.6):.1f}" height="{BAND}" fill="{colour}"/>'
    foot = upper.top + BAND
    corners = ((a[0], foot), (a[0] + a[1], foot), (b[0] + b[1], lower.top), (b[0], lower.top))
    points = " ".join(f"{x:.1f},{y}" for x, y in corners)
    yield f'<polygon points="{points}" fill="{colour}" fill-opacity="0.22"/>'


def text_at(x: float, y: float, text: str, *, kind: str = "", anchor: str = "") -> str:
    """Draw a line of text with a CSS class; ``x`` is its start, middle or end.

    >>> text_at(24, 8, "k < v", kind="small")
    '<text x="24.0" y="8.0" class="small">k &lt; v</text>'
    """
    more = (f' class="{kind}"' if kind else "") + (f' text-anchor="{anchor}"' if anchor else "")
    return f'<text x="{x:.1f}" y="{y:.1f}"{more}>{escape(text, quote=False)}</text>'


def document(title: str, height: float, body: Iterable[str], *, width: float = WIDTH, style: str = "") -> str:
    """Put the elements of a picture into an SVG document; ``style`` is added to the styles of all pictures."""
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.7g} {height}" role="img">',
        f"<title>{escape(title, quote=False)}</title>",
        f"<style>{STYLE}{style}</style>",
        f'<rect class="page" width="{width:.7g}" height="{height}"/>',
        *body,
        "</svg>\n",
    ])  # fmt: skip
