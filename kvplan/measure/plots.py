"""Plots of a bench: bandwidth against run size, and against the slowdown of compute.

Only this module imports matplotlib (``pip install matplotlib``). It does not change pyplot's state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from kvplan.base.numbers import rate, rounded
from kvplan.errors import KVPlanError
from kvplan.measure.rows import IDLE, Ceilings, Row, comparable, pareto, pooled, where

INCHES, DPI = (10.0, 6.0), 150
SMALL, TINY, WIDE = 9.0, 7.5, 6.0  # font sizes and line width, in points
ROOM = 1.14  # the top of an axis, divided by the largest figure and ceiling
MEMCPY = "numpy memcpy"  # the baseline whose line stands for the ceiling of a CPU
STYLE: Any = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial", "sans-serif"],
    "svg.fonttype": "none",  # text stays text, so that it can be searched, read aloud and copied
    "svg.hashsalt": "kvplan",
}
# Okabe and Ito's colours, which colour-blind readers can distinguish. Markers and dashes also distinguish paths.
COLOURS = ("#d55e00", "#0072b2", "#009e73", "#e69f00", "#56b4e9", "#cc79a7", "#666666")
MARKERS = "os^vPXD*"
AUTO, GREY = "auto", "#bbbbbb"  # auto is a wide band under the path that it takes
# The lines of paths are solid, those of baselines are not.
OURS = ("kernel", "staged", "copy_engine", "copy_engine_2d", "host", "host on 1 thread")


def bandwidth(rows: Iterable[Row], ceilings: Ceilings) -> Figure:
    """Draw GB/s against run size, with a panel per direction and host, a line per path, and a dashed ceiling.

    The rows are those of :func:`~kvplan.measure.rows.comparable`. A memcpy that has a line of its own has no ceiling.

    Raises:
        KVPlanError: no row has a figure.
    """
    amount, able = comparable(rows)
    if not able:
        raise KVPlanError("no row has a figure: there is no bandwidth to draw")
    sizes = sorted({row.run_nbytes for row in able})
    looks = _looks(able)
    dashed = ceilings.hard or MEMCPY not in looks

    def panel(axes: Axes, some: Sequence[Row]) -> str:
        for path in [path for path in looks if path in {row.path for row in some}]:
            line = [row for row in some if row.path == path]
            axes.plot([row.run_nbytes for row in line], [row.gbps or 0.0 for row in line], **looks[path])
        axes.set_xscale("log", base=2)
        axes.set_xlim(sizes[0] / 2**0.5, sizes[-1] * 2**0.5)
        axes.set_xticks(sizes, [rounded(size) for size in sizes], fontsize=SMALL)
        axes.set_xticks([], minor=True)
        return f"{some[0].direction}, {pooled(some[0].direction, some[0].host)}"

    handles = [Line2D([], [], label=path, **look) for path, look in looks.items()]
    title = f"GB/s against bytes of a run; every transfer {amount}"
    return _drawn(able, lambda row: row.host, panel, ceilings if dashed else None, title, "bytes of a run", handles)


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

    looks = {path: look | {"linestyle": ""} for path, look in _looks(able).items()}
    order = [*looks]

    def kind(row: Row) -> str:
        return where(row.beside, row.beside_on)

    def panel(axes: Axes, some: Sequence[Row]) -> str:
        front = pareto(some)
        axes.step([row.slowdown or 1.0 for row in front], [row.gbps or 0.0 for row in front], where="post",
                  color="black", linewidth=1.0, zorder=1)  # fmt: skip
        for row in sorted(some, key=lambda row: -order.index(row.path)):  # paths lie on baselines, which are larger
            point = row.slowdown or 1.0, row.gbps or 0.0
            axes.plot(*point, **looks[row.path], markersize=7 if row.path in OURS else 11)
            if row.programs:
                axes.annotate(str(row.programs), point, (5, 3), textcoords="offset points", fontsize=TINY)
        axes.margins(x=0.06)
        axes.xaxis.set_major_formatter(lambda value, _: f"x{value:.2f}")
        axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
        return f"{some[0].direction} beside {kind(some[0])}"

    handles = [Line2D([], [], label=path, **look) for path, look in looks.items()]
    handles.append(Line2D([], [], color="black", linewidth=1.0, label="nothing beats these"))
    moved = f"{able[0].runs:,} runs of {rounded(able[0].run_nbytes)}"
    title = f"GB/s of {moved} against how much slower compute gets"
    return _drawn(able, kind, panel, ceilings, title, "time of an iteration of compute, over one alone", handles)


def save(figure: Figure, path: Path) -> None:
    """Write a figure to a file; the same figure gives the same bytes.

    Args:
        figure: the figure.
        path: path of the file, with the suffix ``.png`` or ``.svg``.

    Raises:
        KVPlanError: the file cannot be written.
    """
    nothing = {"Date": None} if path.suffix.lower() == ".svg" else {"Software": None}
    try:
        with mpl.rc_context(STYLE):
            figure.savefig(path, dpi=DPI, metadata=nothing)
    except OSError as error:
        raise KVPlanError(f"the plot cannot be written to {path}: {error.strerror or error}") from None


def _drawn(
    rows: Sequence[Row], kind: Callable[[Row], str], panel: Callable[[Axes, Sequence[Row]], str],
    ceilings: Ceilings | None, title: str, across: str, handles: Sequence[Line2D],
) -> Figure:  # fmt: skip
    """Draw a panel for each direction and kind of rows. All share one axis of GB/s, on which every point has room."""
    directions, kinds = sorted({row.direction for row in rows}), sorted({kind(row) for row in rows})
    limits = {direction: ceilings.measured[direction] for direction in directions} if ceilings else {}
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=INCHES, layout="constrained", facecolor="white")
        FigureCanvasAgg(figure)
        grid: Any = figure.subplots(len(kinds), len(directions), squeeze=False, sharey=True)
        figure.suptitle(title, fontsize=SMALL + 3, x=0.01, ha="left")
    grid[0][0].set_ylim(0, max([*limits.values(), *(row.gbps or 0.0 for row in rows)]) * ROOM)
    for r, name in enumerate(kinds):
        for c, direction in enumerate(directions):
            axes, some = grid[r][c], [row for row in rows if (kind(row), row.direction) == (name, direction)]
            axes.grid(visible=True, color="#dddddd", linewidth=0.6)
            axes.set_axisbelow(True)
            axes.spines[["top", "right"]].set_visible(False)
            axes.tick_params(labelsize=SMALL)
            if some:
                axes.set_title(panel(axes, some), fontsize=SMALL + 1, loc="left")
            if ceilings:
                axes.axhline(limits[direction], color="black", linestyle=(0, (6, 3)), linewidth=1.0, zorder=2.95)
                axes.text(0.01, limits[direction], f"{ceilings.what} {rate(limits[direction])}", va="bottom",
                          transform=axes.get_yaxis_transform(), fontsize=TINY + 0.5, zorder=2.9)  # fmt: skip
    figure.supylabel("GB/s", fontsize=SMALL)
    figure.supxlabel(across, fontsize=SMALL)
    figure.legend(handles=handles, loc="outside right center", fontsize=SMALL, frameon=False)
    return figure


def _looks(rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """Return how each path is drawn, and then each baseline; in all plots of one run alike."""
    found = {row.path for row in rows}
    others = sorted(found - {AUTO, *OURS})
    looks: dict[str, dict[str, Any]] = {AUTO: {"color": GREY, "linewidth": WIDE, "zorder": 2}} if AUTO in found else {}
    names = [*(path for path in OURS if path in found), *others]
    for path, colour, marker in zip(names, cycle(COLOURS), cycle(MARKERS), strict=False):
        looks[path] = {"color": colour, "marker": marker, "linestyle": "-" if path in OURS else "--", "linewidth": 1.4,
                       "markeredgecolor": "white", "markeredgewidth": 0.5, "zorder": 2.5}  # fmt: skip
    return looks
