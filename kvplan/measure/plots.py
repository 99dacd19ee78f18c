"""Plots of a bench: bandwidth against run size, and against the slowdown of compute.

Only this module imports matplotlib (``pip install matplotlib``). It does not change pyplot's state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from kvplan.base.numbers import rate, rounded
from kvplan.errors import KVPlanError
from kvplan.measure.rows import IDLE, SUFFIXES, Ceilings, Row, comparable, pareto, pooled, where

INCHES, DPI = (10.0, 6.0), 150
# Okabe and Ito's colours, which colour-blind readers can distinguish. Markers and dashes also distinguish paths.
BLACK, BLUE, ORANGE, GREEN, PURPLE, SKY, VERMILION = (
    "#000000", "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00",
)  # fmt: skip
GREY, DARK = "#666666", "#222222"
SMALL, TINY, WIDE = 9.0, 7.5, 6.0  # font sizes and line width, in points
ROOM = 1.14  # the top of an axis, divided by the largest figure and ceiling
MEMCPY = "numpy memcpy"  # the baseline whose line stands for the ceiling of a CPU
STYLE: Any = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial", "sans-serif"],
    "svg.fonttype": "none",  # text stays text, so that it can be searched, read aloud and copied
    "svg.hashsalt": "kvplan",
}


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
    "two processes": Look(BLUE, "s", "-"),
    "one process": Look(VERMILION, "o", "-"),
}
OTHER = Look(GREY, "h", "-.")


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
    dashed = ceilings.hard or MEMCPY not in {row.path for row in able}

    def panel(axes: Axes, some: Sequence[Row]) -> None:
        for path in _ordered({row.path for row in some}):
            line = [row for row in some if row.path == path]
            axes.plot([row.run_nbytes for row in line], [row.gbps or 0.0 for row in line], **_look(path, size=5))
        axes.set_xscale("log", base=2)
        axes.set_xlim(sizes[0] / 2**0.5, sizes[-1] * 2**0.5)
        axes.set_xticks(sizes, [rounded(size) for size in sizes], fontsize=SMALL)
        axes.set_xticks([], minor=True)

    return _drawn(able, lambda row: row.host, lambda row: pooled(row.direction, row.host), ", ", panel,
                  ceilings if dashed else None, f"GB/s against bytes of a run; every transfer {amount}",
                  "bytes of a run", {})  # fmt: skip


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

    def panel(axes: Axes, some: Sequence[Row]) -> None:
        front = pareto(some)
        axes.step([row.slowdown or 1.0 for row in front], [row.gbps or 0.0 for row in front], where="post",
                  color=BLACK, linewidth=1.0, zorder=1)  # fmt: skip
        paths = _ordered({row.path for row in some})
        for row in sorted(some, key=lambda row: -paths.index(row.path)):  # paths lie on baselines, which are larger
            point = row.slowdown or 1.0, row.gbps or 0.0
            axes.plot(*point, **_look(row.path, size=7 if _is_path(row.path) else 11, line=False))
            if row.programs:
                axes.annotate(str(row.programs), point, (5, 3), textcoords="offset points", fontsize=TINY, color=DARK)
        slower = [1.0, 1.05, *(row.slowdown or 1.0 for row in some)]
        margin = 0.06 * (max(slower) - min(slower))
        axes.set_xlim(min(slower) - margin, max(slower) + margin)
        axes.xaxis.set_major_formatter(lambda value, _: f"x{value:.2f}")
        axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))

    moved = f"{able[0].runs:,} runs of {rounded(able[0].run_nbytes)}"
    return _drawn(able, lambda row: where(row.beside, row.beside_on), lambda row: where(row.beside, row.beside_on),
                  " beside ", panel, ceilings, f"GB/s of {moved} against how much slower compute gets",
                  "time of an iteration of compute, over one alone", {"line": False})  # fmt: skip


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


def _drawn(
    rows: Sequence[Row], kind: Callable[[Row], str], words: Callable[[Row], str], between: str,
    panel: Callable[[Axes, Sequence[Row]], None], ceilings: Ceilings | None, title: str, across: str,
    look: dict[str, Any],
) -> Figure:  # fmt: skip
    """Draw a panel for each direction and kind of rows. All share one axis of GB/s, on which every point has room."""
    directions, kinds = sorted({row.direction for row in rows}), sorted({kind(row) for row in rows})
    limits = {direction: ceilings.of(direction) for direction in directions} if ceilings else {}
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
                panel(axes, some)
                axes.set_title(f"{direction}{between}{words(some[0])}", fontsize=SMALL + 1, loc="left")
            if ceilings:
                axes.axhline(limits[direction], color=BLACK, linestyle=(0, (6, 3)), linewidth=1.0, zorder=2.95)
                axes.text(0.01, limits[direction], f"{ceilings.what} {rate(limits[direction])}", va="bottom", ha="left",
                          transform=axes.get_yaxis_transform(), fontsize=TINY + 0.5, zorder=2.9)  # fmt: skip
    figure.supylabel("GB/s", fontsize=SMALL)
    figure.supxlabel(across, fontsize=SMALL)
    handles = [Line2D([], [], label=path, **_look(path, size=6, **look)) for path in _ordered({r.path for r in rows})]
    if look:
        handles.append(Line2D([], [], color=BLACK, linewidth=1.0, label="nothing beats these"))
    figure.legend(handles=handles, loc="outside right center", fontsize=SMALL, frameon=False)
    return figure


def _ordered(paths: Iterable[str]) -> list[str]:
    """Return the names of paths in order, then the names of baselines."""
    return sorted(paths, key=lambda path: (list(LOOKS).index(path) if path in LOOKS else len(LOOKS), path))


def _is_path(path: str) -> bool:
    return bool(LOOKS.get(path, OTHER).dashes == "-")


def _look(path: str, *, size: float, line: bool = True) -> dict[str, Any]:
    look = LOOKS.get(path, OTHER)
    return {
        "color": look.colour, "marker": look.marker, "linestyle": look.dashes if line else "", "markersize": size,
        "linewidth": 1.4 if look.marker else WIDE, "markeredgecolor": "white", "markeredgewidth": 0.5,
        "zorder": 2.5 if look.marker else 2,
    }  # fmt: skip
