"""Plots of a bench: bandwidth against run size, and against the slowdown of compute.

Only this module imports matplotlib (``pip install matplotlib``). It does not change pyplot's state.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator
from matplotlib.transforms import Bbox

from kvplan.base.numbers import rate, rounded
from kvplan.errors import KVPlanError
from kvplan.measure.rows import IDLE, SUFFIXES, Ceilings, Row, at_equal_bytes, pareto, pooled, where

INCHES, DPI = (10.0, 6.0), 150
# Okabe and Ito's colours, which colour-blind readers can distinguish. Markers and dashes also distinguish paths.
BLACK, BLUE, ORANGE, GREEN, PURPLE, SKY, VERMILION = (
    "#000000", "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00",
)  # fmt: skip
GREY, DARK = "#666666", "#222222"
GAP, FAR = 7.0, 12.0  # pixels from a point to its label, and the distance from which a line joins them
SMALL, TINY, WIDE = 9.0, 7.5, 6.0  # font sizes and line width, in points
ROOM = 1.14  # the top of an axis, divided by the ceiling
PAPER: Any = {"facecolor": "white", "edgecolor": "none", "alpha": 0.75, "pad": 0.4}  # behind a label
MEMCPY = "numpy memcpy"  # the baseline whose line stands for the ceiling of a CPU
STYLE: Any = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial", "sans-serif"],
    "svg.fonttype": "none",  # text stays text, so that it can be searched, read aloud and copied
    "svg.hashsalt": "kvplan",
}


Box = tuple[float, float, float, float]  # left, low, right, high, in pixels


class Look(NamedTuple):
    """The colour, marker and dashes of a path. Lines of paths are solid, lines of baselines are not."""

    colour: str
    marker: str
    dashes: Any


LOOKS = {
    "auto": Look("#bbbbbb", "", "-"),  # wide, and under the path that it takes
    "kernel": Look(VERMILION, "o", "-"),
    "staged": Look(BLUE, "s", "-"),
    "copy_engine": Look(GREEN, "^", "-"),
    "copy_engine_2d": Look(ORANGE, "v", "-"),
    "host": Look(BLUE, "s", "-"),
    "host on 1 thread": Look(VERMILION, "o", "-"),
    "cuMemcpyBatchAsync": Look(SKY, "P", "--"),
    "cuMemcpyAsync a run": Look(PURPLE, "X", ":"),
    "torch indexing": Look(GREY, "D", "-."),
    MEMCPY: Look(SKY, "P", "--"),
    "one large copy": Look(DARK, "*", ":"),
    "NCCL send/recv": Look(PURPLE, "X", ":"),
}
OTHER = Look(GREY, "h", "-.")


def bandwidth(rows: Iterable[Row], ceilings: Ceilings) -> Figure:
    """Draw GB/s against run size, with a panel per direction and host, a line per path, and a dashed ceiling.

    All points move the same bytes, nearly: those that were measured for the most run sizes. Rows beside compute, and
    rows without a figure, are left out. A memcpy that has a line of its own has no ceiling.

    Raises:
        KVPlanError: no row has a figure.
    """
    nbytes, panels = at_equal_bytes(rows)
    if not panels:
        raise KVPlanError("no row has a figure: there is no bandwidth to draw")
    directions = sorted({direction for direction, _ in panels})
    hosts = sorted({host for _, host in panels})
    figure, grid = _panels(
        len(hosts), len(directions), f"GB/s against bytes of a run; every transfer moves {rounded(nbytes)}"
    )
    sizes = sorted({row.run_nbytes for paths in panels.values() for some in paths.values() for row in some})
    for r, host in enumerate(hosts):
        for c, direction in enumerate(directions):
            axes = grid[r][c]
            paths = panels.get((direction, host), {})
            for path in _ordered(paths):
                _line(axes, paths[path])
            drawn = [row.gbps or 0.0 for some in paths.values() for row in some]
            if ceilings.hard or MEMCPY not in paths:
                ceiling = ceilings.of(direction)
                _ceiling(axes, ceiling, ceilings.what, max([ceiling, *drawn]) * ROOM)
            else:
                axes.set_ylim(0, max(drawn) * ROOM)
            axes.set_title(f"{direction}, {pooled(direction, host)}", fontsize=SMALL + 1, loc="left")
            axes.set_xscale("log", base=2)
            axes.set_xlim(sizes[0] / 2**0.5, sizes[-1] * 2**0.5)
            axes.set_xticks(sizes, [rounded(size) for size in sizes], fontsize=SMALL)
            axes.set_xticks([], minor=True)
            if c == 0:
                axes.set_ylabel("GB/s", fontsize=SMALL)
            if r == len(hosts) - 1:
                axes.set_xlabel("bytes of a run", fontsize=SMALL)
    _legend(figure, _ordered({path for paths in panels.values() for path in paths}), lines=True)
    return figure


def frontier(rows: Iterable[Row], ceilings: Ceilings) -> Figure:
    """Draw GB/s beside compute against its slowdown, with a panel per direction, kind of compute and its GPU.

    The stepped line joins the rows of :func:`~kvplan.measure.rows.pareto`. A number at a kernel's point is its number
    of Triton programs.

    Raises:
        KVPlanError: no row beside compute has both figures.
    """
    able = [row for row in rows if row.beside != IDLE and row.gbps is not None and row.slowdown is not None]
    if not able:
        raise KVPlanError("no row beside compute has a figure: there is no frontier to draw")
    directions = sorted({row.direction for row in able})
    kinds = sorted({(row.beside, row.beside_on) for row in able})
    moved = f"{able[0].runs:,} runs of {rounded(able[0].run_nbytes)}"
    figure, grid = _panels(len(kinds), len(directions), f"GB/s of {moved} against how much slower compute gets")
    for r, kind in enumerate(kinds):
        for c, direction in enumerate(directions):
            axes = grid[r][c]
            some = [row for row in able if (row.beside, row.beside_on, row.direction) == (*kind, direction)]
            _points(axes, some)
            _ceiling(axes, ceilings.of(direction), ceilings.what, max(
                [ceilings.of(direction), *(row.gbps or 0.0 for row in some)]) * ROOM)  # fmt: skip
            axes.set_title(f"{direction} beside {where(*kind)}", fontsize=SMALL + 1, loc="left")
            slowest = max([1.05, *(row.slowdown or 1.0 for row in some)])
            quickest = min([1.0, *(row.slowdown or 1.0 for row in some)])
            margin = 0.06 * (slowest - quickest)
            axes.set_xlim(quickest - 2 * margin, slowest + 4 * margin)  # labels are at the right of points
            axes.xaxis.set_major_formatter(lambda value, _: f"x{value:.2f}")
            axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
            axes.tick_params(labelsize=SMALL)
            if c == 0:
                axes.set_ylabel("GB/s", fontsize=SMALL)
            if r == len(kinds) - 1:
                axes.set_xlabel("time of an iteration of compute, over one alone", fontsize=SMALL)
    _legend(figure, _ordered({row.path for row in able}), lines=False)
    _label(figure, [(axes, [row for row in able
                            if (row.beside, row.beside_on, row.direction) == (*kinds[r], directions[c])])
                    for r, line in enumerate(grid) for c, axes in enumerate(line)])  # fmt: skip
    return figure


def save(figure: Figure, path: Path) -> None:
    """Write a figure to a file; the same figure gives the same bytes.

    Args:
        figure: the figure.
        path: path of the file, with the suffix ``.png`` or ``.svg``.

    Raises:
        KVPlanError: the suffix is another one, or the file cannot be written.
    """
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise KVPlanError(f"{path}: a plot is {' or '.join(SUFFIXES)}, not {suffix or 'a file without a suffix'}")
    nothing = {"Date": None} if suffix == ".svg" else {"Software": None}
    try:
        with mpl.rc_context(STYLE):
            figure.savefig(path, format=suffix[1:], dpi=DPI, metadata=nothing)
    except OSError as error:
        raise KVPlanError(f"the plot cannot be written to {path}: {error.strerror or error}") from None


def _panels(rows: int, columns: int, title: str) -> tuple[Figure, Sequence[Sequence[Axes]]]:
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=INCHES, layout="constrained", facecolor="white")
        FigureCanvasAgg(figure)
        grid: Any = figure.subplots(rows, columns, squeeze=False, sharey="col")
        figure.suptitle(title, fontsize=SMALL + 3, x=0.01, ha="left")
    for axes in grid.flat:
        axes.grid(visible=True, color="#dddddd", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=SMALL)
    return figure, grid


def _ordered(paths: Iterable[str]) -> list[str]:
    """Return the names of paths in order, then the names of baselines."""
    return sorted(paths, key=lambda path: (list(LOOKS).index(path) if path in LOOKS else len(LOOKS), path))


def _line(axes: Axes, some: Sequence[Row]) -> None:
    look = LOOKS.get(some[0].path, OTHER)
    axes.plot([row.run_nbytes for row in some], [row.gbps or 0.0 for row in some], color=look.colour,
              marker=look.marker, linestyle=look.dashes, markersize=5, linewidth=1.4 if look.marker else WIDE,
              markeredgecolor="white", markeredgewidth=0.5, zorder=2.5 if look.marker else 2)  # fmt: skip


def _ceiling(axes: Axes, gbps: float, what: str, top: float) -> None:
    axes.axhline(gbps, color=BLACK, linestyle=(0, (6, 3)), linewidth=1.0, zorder=2.95)
    axes.text(0.01, gbps, f"{what} {rate(gbps)}", transform=axes.get_yaxis_transform(), fontsize=TINY + 0.5,
              va="bottom", ha="left", zorder=2.9, bbox=PAPER)  # fmt: skip
    axes.set_ylim(0, top)


def _legend(figure: Figure, paths: Sequence[str], *, lines: bool) -> None:
    """Draw the legend outside the panels, at the right."""
    handles = []
    for path in paths:
        look = LOOKS.get(path, OTHER)
        dashes: Any = look.dashes if lines else ""
        width = 1.4 if look.marker else WIDE
        handles.append(Line2D([], [], color=look.colour, marker=look.marker, linestyle=dashes, markersize=6,
                              linewidth=width, markeredgecolor="white", markeredgewidth=0.5, label=path))  # fmt: skip
    if not lines:
        handles.append(Line2D([], [], color=BLACK, linewidth=1.0, label="nothing beats these"))
    figure.legend(handles=handles, loc="outside right center", fontsize=SMALL, frameon=False)


def _points(axes: Axes, some: Sequence[Row]) -> None:
    front = pareto(some)
    if front:
        axes.step([row.slowdown or 1.0 for row in front], [row.gbps or 0.0 for row in front], where="post",
                  color=BLACK, linewidth=1.0, zorder=1)  # fmt: skip
    for row in some:
        look = LOOKS.get(row.path, OTHER)
        axes.plot([row.slowdown or 1.0], [row.gbps or 0.0], color=look.colour, marker=look.marker, linestyle="",
                  markersize=7, markeredgecolor="white", markeredgewidth=0.5, zorder=3)  # fmt: skip


def _label(figure: Figure, panels: Sequence[tuple[Axes, Sequence[Row]]]) -> None:
    """Place each point's label inside its panel, so that it covers no point and no other label if possible."""
    figure.draw_without_rendering()  # now the layout is known, in pixels
    figure.set_layout_engine("none")
    points = 72 / figure.dpi  # points per pixel: offsets in points are right at any resolution
    renderer: Any = figure.canvas.get_renderer()  # type: ignore[attr-defined]
    for axes, some in panels:
        within = _corners(axes.get_window_extent(renderer))
        spots = [axes.transData.transform((row.slowdown or 1.0, row.gbps or 0.0)) for row in some]
        taken = [_box(x - 5, y - 5, 10, 10) for x, y in spots]
        taken += [_corners(text.get_window_extent(renderer)) for text in axes.texts]
        taken += [box for line in axes.lines for box in _segments(line)]
        for row, spot in sorted(zip(some, spots, strict=True), key=lambda one: -one[1][1]):
            x, y = row.slowdown or 1.0, row.gbps or 0.0
            text = axes.annotate(row.label, (x, y), (0, 0), fontsize=TINY, color=DARK, textcoords="offset points",
                                 va="bottom", ha="left", zorder=2.8, bbox=PAPER)  # fmt: skip
            _, _, width, height = text.get_window_extent(renderer).bounds
            height += 3
            boxes = [(_covered(_box(spot[0] + right, spot[1] + up, width, height), taken, within)
                      + 0.02 * abs(up), right, up) for right, up in _places(width, height)]  # fmt: skip
            _, right, up = min(boxes, key=lambda one: one[0])
            text.set_position((right * points, up * points))
            if abs(up + height / 2) > FAR:
                joint = 0.0 if -width < right < 0 else right + width if right < 0 else right
                axes.annotate("", (x, y), (joint * points, (up + height / 2) * points), textcoords="offset points",
                              arrowprops={"arrowstyle": "-", "linewidth": 0.5, "color": GREY})  # fmt: skip
            taken.append(_box(spot[0] + right, spot[1] + up, width, height))


def _segments(line: Line2D) -> Iterator[Box]:
    """Yield boxes around the segments of a line; a line of single points has no box."""
    if line.get_linestyle() == "None":
        return
    corners = line.get_transform().transform_path(line.get_path()).vertices
    for (x, y), (right, up) in pairwise(np.asarray(corners).tolist()):
        yield min(x, right) - 1, min(y, up) - 1, max(x, right) + 1, max(y, up) + 1


def _places(width: float, height: float) -> Iterator[tuple[float, float]]:
    """Yield offsets of a label's lower left corner from its point, in pixels, the best first."""
    for step in range(12):
        for sign in (1, -1) if step else (1,):
            rise = sign * step * height / 2 - height / 2
            yield GAP, rise
            yield -width - GAP, rise
            if step >= 2:
                yield -width / 2, rise


def _corners(box: Bbox) -> Box:
    left, low, right, high = map(float, box.extents)
    return left, low, right, high


def _box(left: float, low: float, width: float, height: float) -> Box:
    return float(left), float(low), float(left + width), float(low + height)


def _covered(box: Box, taken: Sequence[Box], within: Box) -> float:
    """Count the pixels of a label that cover another box, or lie outside the panel."""
    outside = _shared(box, box) - _shared(box, within)
    return sum(_shared(box, other) for other in taken) + outside


def _shared(a: Box, b: Box) -> float:
    width, height = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
    return width * height if width > 0 and height > 0 else 0.0
