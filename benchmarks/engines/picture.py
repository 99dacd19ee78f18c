"""Draw traces of hits as SVG: the engine's thread, copies and compute of each way, on one axis of time.

python -m benchmarks.engines.picture RESULT.json [WAY ...] [--out docs/pictures/engine-hit.svg]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.engines.shapes import SHAPES
from benchmarks.engines.ways import way_of
from kvplan.draw.ribbons import text_at
from kvplan.draw.svg import EM, MARGIN, STYLE, WIDTH

OUT = Path(__file__).parents[2] / "docs" / "pictures" / "engine-hit.svg"
NAMES = 132  # pixels left of the lanes
LANE, BETWEEN, BLOCK = 24, 6, 22  # heights in pixels: lane, space below it, space below a way
PICTURE_MS = 1.02  # the axis ends a little after the longest hit
_TICKS_MS = (0.5, 1, 2, 5, 10, 20, 50, 100)
_MOST_TICKS = 12
_LEAST_WIDTH = 0.4  # pixels: thinner pieces are not seen


class Kind(NamedTuple):
    """Spans that share a colour."""

    title: str
    colour: str
    spans: tuple[str, ...]


# Okabe and Ito's colours, as in the other pictures.
THREAD = (
    Kind("request: hashes", "#cc79a7", ("add request (hashes)",)),
    Kind("scheduling", "#f0e442", ("schedule", "look up", "allocate blocks", "prepare load", "metadata", "update")),
    Kind("input preparation", "#56b4e9", ("input preparation",)),
    Kind("submit of loads", "#d55e00", ("submit loads", "kvplan: submit")),
    Kind("launches of the forward pass", "#009e73", ("forward",)),
    Kind("layer waits", "#000000", ("layer wait",)),
    Kind("stores and reports", "#8a8a8a", ("submit stores", "poll transfers")),
    Kind("sampling and output", "#9db4c8", ("sampling", "wait for the token", "output")),
)
COPIES = Kind("bytes to the GPU", "#e69f00", ("copies in", "copy kernels"))
COMPUTE = Kind("compute on the GPU", "#0072b2", ("compute",))
Trace = Mapping[str, Any]


def engine_svg(traces: Sequence[Trace]) -> str:
    """Return the picture of some traces of one shape, the first one on top.

    Raises:
        ValueError: there is no trace, or they are of several shapes or prompts.
    """
    prompts = {(trace["shape"], trace["held"], trace["suffix"]) for trace in traces}
    if len(prompts) != 1:
        raise ValueError(f"a picture needs traces of one shape and one prompt, got {sorted(prompts) or 'no trace'}")
    ((shape, held, suffix),) = prompts
    title = f"{SHAPES[shape].title}: a prompt of {held:,} tokens that the host holds, and {suffix} new ones"
    body = list(_body(traces, title))
    height = int(body.pop())
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" class="kvplan-block" viewBox="0 0 {WIDTH} {height}" role="img">',
            f"<title>{escape(title)}</title>",
            f"<desc>{escape(spoken(traces))}</desc>",
            f"<style>{STYLE}</style>",
            f'<rect class="page" width="{WIDTH}" height="{height}"/>',
            *body,
            "</svg>\n",
        ]
    )


def spoken(traces: Sequence[Trace]) -> str:
    """Return the picture in words.

    >>> spoken([{"way": "kvplan-layers", "ms": 27.83, "busy_ms": {"copies in": 14.42, "compute": 13.1}}])
    'kvplan, by layer: first token after 27.8 ms; bytes to the GPU 14.4 ms, compute on the GPU 13.1 ms.'
    """
    told = []
    for trace in traces:
        copied = sum(trace["busy_ms"].get(name, 0.0) for name in COPIES.spans)
        compute = trace["busy_ms"].get("compute", 0.0)
        told.append(f"{_heading(trace)}; {COPIES.title} {copied:.1f} ms, {COMPUTE.title} {compute:.1f} ms.")
    return " ".join(told)


def _heading(trace: Trace) -> str:
    return f"{way_of(trace['way']).title}: first token after {trace['ms']:.1f} ms"


class Axis(NamedTuple):
    """Where a time stands on the page."""

    most: float  # ms at the right end

    @property
    def scale(self) -> float:
        """Pixels per ms."""
        return (WIDTH - 2 * MARGIN - NAMES) / self.most

    def ticks(self) -> list[float]:
        """Return round times, ms."""
        step = next((tick for tick in _TICKS_MS if self.most / tick <= _MOST_TICKS), _TICKS_MS[-1])
        return [place * step for place in range(int(self.most / step) + 1)]

    def x(self, ms: float) -> float:
        """Return the pixels of a time."""
        return MARGIN + NAMES + min(max(ms, 0.0), self.most) * self.scale


def _body(traces: Sequence[Trace], title: str) -> Iterator[str]:
    """Yield the elements from top to bottom, and at last the height of the page."""
    axis = Axis(max(trace["ms"] for trace in traces) * PICTURE_MS)
    yield text_at(MARGIN, 30, title, kind="head")
    top = 58
    drawn = {
        kind.title: kind for kind in THREAD if any(span[0] in kind.spans for one in traces for span in one["spans"])
    }
    x = float(MARGIN)
    for kind in [*drawn.values(), COPIES, COMPUTE]:
        width = 30 + len(kind.title) * 12 * EM + 16
        if x + width > WIDTH - MARGIN:
            x, top = float(MARGIN), top + 22
        yield f'<rect x="{x:.1f}" y="{top - 11}" width="24" height="14" fill="{kind.colour}"/>'
        yield text_at(x + 30, top, kind.title, kind="label")
        x += width
    top += 22
    for trace in traces:
        yield text_at(MARGIN, top + 14, _heading(trace), kind="bold")
        top += 24
        lanes = top
        for name, pieces in _lanes(trace):
            yield text_at(MARGIN, top + 16, name, kind="label")
            width = axis.most * axis.scale
            yield f'<rect class="back" x="{axis.x(0):.1f}" y="{top}" width="{width:.1f}" height="{LANE}"/>'
            for start, length, kind, words in pieces:
                yield from _piece(axis, top, start, length, kind.colour, words)
            top += LANE + BETWEEN
        bottom = top - BETWEEN
        for ms in axis.ticks():
            x = axis.x(ms)
            yield f'<line class="hatch" opacity=".4" x1="{x:.1f}" y1="{lanes}" x2="{x:.1f}" y2="{bottom}"/>'
        end = axis.x(trace["ms"])
        yield f'<line class="run" x1="{end:.1f}" y1="{lanes}" x2="{end:.1f}" y2="{bottom}"/>'
        top += BLOCK
    for ms in axis.ticks():
        yield text_at(axis.x(ms), top - BLOCK + 10, f"{ms:g} ms", kind="small", anchor="middle")
    yield str(top + 4)


def _lanes(trace: Trace) -> Iterator[tuple[str, list[tuple[float, float, Kind, str]]]]:
    """Yield the name of each lane and its pieces: start and length in ms, kind, and words."""
    kinds = {name: kind for kind in THREAD for name in kind.spans}
    # Inner spans come later than the spans around them, and are drawn over them.
    yield (
        "engine's thread",
        [(start, length, kinds[name], name) for name, start, length in trace["spans"] if name in kinds],
    )
    for kind in (COPIES, COMPUTE):
        busy = [(start, length, kind, name) for name in kind.spans for start, length in trace["gpu"].get(name, [])]
        yield kind.title, busy


def _piece(axis: Axis, top: int, start: float, length: float, colour: str, words: str) -> Iterator[str]:
    left, right = axis.x(start), axis.x(start + length)
    if right - left >= _LEAST_WIDTH:
        yield (f'<rect x="{left:.1f}" y="{top}" width="{right - left:.1f}" height="{LANE}" fill="{colour}">'
               f"<title>{escape(words)}: {length:.2f} ms</title></rect>")  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw; 0 if a picture was written, 2 without traces."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engines.picture", description=__doc__)
    parser.add_argument("result", type=Path)
    parser.add_argument("ways", nargs="*", help="by default all that were traced")
    parser.add_argument("--shape", help="by default the first one that was traced")
    parser.add_argument("--out", type=Path, default=OUT)
    chosen = parser.parse_args(arguments)
    traces = json.loads(chosen.result.read_text())["traces"]
    shape = chosen.shape or (traces[0]["shape"] if traces else "")
    by_way = {trace["way"]: trace for trace in traces if trace["shape"] == shape}
    missing = [way for way in chosen.ways if way not in by_way]
    if missing or not by_way:
        print(
            f"no trace of {', '.join(missing) or 'any way'}; {chosen.result} has {', '.join(by_way) or 'none'}",
            file=sys.stderr,
        )
        return 2
    chosen.out.write_text(engine_svg([by_way[way] for way in chosen.ways or by_way]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
