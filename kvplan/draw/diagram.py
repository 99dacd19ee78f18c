"""Draw a program as SVG: the runs of one unit between source and destination."""

from __future__ import annotations

from collections.abc import Iterator

from kvplan.draw.ribbons import BAND, COLOURS, MARGIN, WIDTH, Line, document, ribbon, text_at
from kvplan.layout.strides import Int64Array
from kvplan.program.explain import run_times
from kvplan.program.program import Program, RunGroup, merge_ranges

GAP, CAPTION = 72, 20  # heights in pixels: the space that ribbons cross, a line of text
GROUP = 2 * BAND + GAP + 4 * CAPTION  # height of one run group
MAX_DRAWN = 160  # runs per run group; if there are more, evenly chosen runs are drawn


def diagram(program: Program, title: str, sides: tuple[str, str]) -> str:
    """Draw one unit as SVG text: the source's bytes above, the destination's bytes below, and the runs between them.

    A small space stands for bytes that the unit does not touch.

    Args:
        program: the run groups.
        title: title of the picture, for screen readers.
        sides: the source and the destination in words.
    """
    body = [text_at(MARGIN, 24 + k * CAPTION, side) for k, side in enumerate(sides)]
    for number, group in enumerate(program.groups):
        body += _group(group, 3 * CAPTION + number * GROUP + 8)
    return document(title, 3 * CAPTION + MARGIN + len(program.groups) * GROUP, body)


def _group(group: RunGroup, top: int) -> Iterator[str]:
    # A unit may have half a million runs: only those that are drawn become Python objects.
    count, sizes = group.packed.shape[1], group.packed[2]
    shown = group.packed[:, :: -(-count // MAX_DRAWN)].T.tolist()
    note = "" if len(shown) == count else f"; {len(shown)} of them drawn"
    yield text_at(MARGIN, top + 12, f"{run_times(count, int(sizes.min()), int(sizes.max()))} a unit{note}")
    upper = top + 2 * CAPTION
    lower = upper + BAND + GAP
    lines = [
        Line(_stretches(group.packed[side], sizes), MARGIN, at, WIDTH - 2 * MARGIN)
        for side, at in ((0, upper), (1, lower))
    ]
    for line, name, at in ((lines[0], "source", upper - 4), (lines[1], "destination", lower + BAND + 14)):
        yield from line.bands()
        held = [end - start for start, end in line.ranges]
        apart = "apart" if len(held) > 1 else "contiguous"
        yield text_at(MARGIN, at, f"{name}: {run_times(len(held), min(held), max(held))}, {apart}", kind="small")
    for k, (src, dst, nbytes) in enumerate(shown):
        yield from ribbon(lines[0], lines[1], src, dst, nbytes, COLOURS[k % len(COLOURS)])


def _stretches(start: Int64Array, nbytes: Int64Array) -> Iterator[tuple[int, int]]:
    """Yield first byte and end of each stretch of runs that touch."""
    first, length = merge_ranges(start, nbytes)
    yield from zip(first.tolist(), (first + length).tolist(), strict=True)
