"""Draw docs/pictures/gpu-to-gpu.svg, the routes between two GPUs: ``python docs/tools/routes_picture.py``.

The sizes of the kernels come from ``kvplan/cost/policy.py``. A test compares the picture with both files.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

from kvplan.cost.policy import IDLE_KERNELS

PICTURE = Path(__file__).parents[2] / "docs" / "pictures" / "gpu-to-gpu.svg"
WIDTH, PANEL, TOP = 860, 232, 98  # pixels: the page, one route with the space below it, and the first route's top
LEFTS, GPU, HEIGHT = (24, 502), 334, 172  # pixels: left edges of the two GPUs, their width and height
SMS, LANE, HBM, BAR = 40, 88, 106, 32  # pixels below a GPU's top: SMs, the lane of arrows, memory; height of a bar
EDGE, PITCH, COLUMNS = 24, 13, 18  # pixels from the link's side to the first column, of a column; columns of a bar
GAP = range(LEFTS[0] + GPU, LEFTS[1])  # pixels between the GPUs, which the link fills
HELD = (7, 11, 16), (6, 9, 14)  # columns of the request's blocks in the source and in the destination
PULLING = 3  # columns of SMs that stand for the few programs of a pull


class Route(NamedTuple):
    """One way from GPU to GPU: its words, the GPUs (0 is the source) that run a kernel, and words below each GPU."""

    name: str
    words: str
    runs: tuple[int, ...]
    sizes: tuple[str, str]


def _routes() -> tuple[Route, ...]:
    assert IDLE_KERNELS["push"].programs == 0
    pull = f"{IDLE_KERNELS['pull'].programs} programs for the speed of the link"
    return (
        Route("push", "The source's GPU runs the kernel: it reads its own memory and writes over the link.", (0,),
              ("one program per SM for the speed of the link", "all SMs are free")),
        Route("pull", "The destination's GPU runs the kernel: it reads over the link and writes its own memory.", (1,),
              ("all SMs are free", pull)),
        Route("staged", "A kernel gathers, a copy engine moves a ring, a kernel scatters: no faster, so not built.",
              (0, 1), ("gather into the ring", "scatter out of the ring")),
    )  # fmt: skip


ROUTES = _routes()
LEGEND = (
    ("busy", "SM that runs the kernel"), ("sm", "free SM"), ("held", "block of the request"), ("cell", "other block"),
    ("units", "header: unit addresses"), ("ring", "ring"),
)  # fmt: skip
STYLE = (
    "text{font:13px system-ui,-apple-system,'Segoe UI','DejaVu Sans',sans-serif;fill:#1b1b1b}"
    ".head{font-size:15px;font-weight:600}.gpu{font-weight:600}.small{font-size:11px;fill:#4d4d4d}"
    ".page{fill:#fff}.box{fill:#f4f6f8;stroke:#8a94a3}.bar{fill:#fff;stroke:#8a94a3}.link{fill:#dde2e8}"
    ".sm{fill:#fff;stroke:#8a94a3}.busy{fill:#009e73;stroke:#00684b}.cell{fill:#e3e7ec}.held{fill:#56b4e9}"
    ".ring{fill:#cc79a7}.units{fill:#f0e442}.read,.write,.copy{fill:none;stroke-width:2.2}.thin{stroke-width:1.2}"
    ".read{stroke:#0072b2}.write{stroke:#d55e00}.copy{stroke:#a3457c;stroke-dasharray:7 4}"
    ".read-tip{fill:#0072b2}.write-tip{fill:#d55e00}.copy-tip{fill:#a3457c}"
    "@media(prefers-color-scheme:dark){text{fill:#f0f0f0}.small{fill:#bdbdbd}.page{fill:#161616}"
    ".box{fill:#22262c}.bar,.sm{fill:#161616}.link{fill:#3a4048}.cell{fill:#30353d}"
    ".read{stroke:#56b4e9}.read-tip{fill:#56b4e9}.write{stroke:#ff8c42}.write-tip{fill:#ff8c42}"
    ".copy{stroke:#e59ac4}.copy-tip{fill:#e59ac4}}"
)


def drawn() -> str:
    """Return the picture as SVG text, for light and dark pages. It loads no other files."""
    height = TOP + PANEL * len(ROUTES) - 30
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
            "<title>Push, pull and staged: three ways from the memory of one GPU to that of another</title>",
            f"<desc>{escape(' '.join(f'{route.name}: {route.words}' for route in ROUTES))}</desc>",
            f"<style>{STYLE}</style>",
            f'<rect class="page" width="{WIDTH}" height="{height}"/>',
            *_legend(),
            *(line for number, route in enumerate(ROUTES) for line in _panel(route, TOP + PANEL * number)),
            "</svg>\n",
        ]
    )


def _legend() -> Iterator[str]:
    yield _text(24, 30, "From the memory of one GPU to that of another", "head")
    x = 24
    for kind, words in LEGEND:
        yield f'<rect class="{kind}" x="{x}" y="47" width="12" height="12" rx="2"/>'
        yield _text(x + 17, 57, words, "small")
        x += 32 + round(5.9 * len(words))
    for x, kind in zip(range(644, WIDTH, 66), ("read", "write", "copy"), strict=False):
        yield from _arrow(kind, (x, 26), (x + 26, 26))
        yield _text(x + 32, 30, kind, "small")


def _panel(route: Route, top: int) -> Iterator[str]:
    """Yield one route: its words, both GPUs, the link, and the arrows of its bytes."""
    yield f'<text x="24" y="{top}"><tspan class="gpu">{route.name}</tspan> · {escape(route.words)}</text>'
    top += 12
    yield f'<rect class="link" x="{GAP.start}" y="{top + SMS - 4}" width="{len(GAP)}" height="{HBM + BAR + 8 - SMS}"/>'
    yield _text(GAP.start + len(GAP) / 2, top + SMS - 12, "NVLink", "gpu", anchor="middle")
    for side in (0, 1):
        yield from _gpu(side, route, top)
    yield from {"push": _push, "pull": _pull, "staged": _staged}[route.name](top)


def _gpu(side: int, route: Route, top: int) -> Iterator[str]:
    x, runs, staged = LEFTS[side], side in route.runs, len(route.runs) > 1
    outer, anchor = ((x + EDGE, "start"), (x + GPU - EDGE, "end"))[side]
    inner, other = ((x + GPU - EDGE, "end"), (x + EDGE, "start"))[side]
    yield f'<rect class="box" x="{x}" y="{top}" width="{GPU}" height="{HEIGHT}" rx="8"/>'
    yield _text(outer, top + 24, f"cuda:{side}, {('source', 'destination')[side]}", "gpu", anchor)
    if runs and not staged:
        yield _text(inner, top + 24, f'Executor("cuda:{side}")', "small", other)
    yield _text(inner, top + HEIGHT - 12, route.sizes[side], "small", other)
    for name, y in (("SMs", SMS), ("HBM", HBM)):
        yield _text(outer, top + y + 21, name, "small", anchor)
    left = min(_left(side, 0), _left(side, COLUMNS - 1))
    yield f'<rect class="bar" x="{left - 4}" y="{top + HBM}" width="{COLUMNS * PITCH + 6}" height="{BAR}" rx="4"/>'
    for k in range(COLUMNS):
        busy = runs and (k < PULLING or route.name != "pull")
        yield _square("busy" if busy else "sm", side, k, top + SMS + 6, 20)
        yield _square("held" if k in HELD[side] else "cell", side, k, top + HBM + 6, 20)
    first = 0
    if staged:
        yield _square("ring", side, 0, top + HBM + 6, 20, columns=3)
        first = 3
    if runs:
        yield _square("units", side, first, top + HBM + 6, 20, columns=2)
        x = _middle(side, first + 0.5)
        yield from _arrow("read thin", (x, top + HBM + 8), (x, top + SMS + 27))


def _push(top: int) -> Iterator[str]:
    yield from _up(0, HELD[0], top)
    turn = GAP.stop - 40
    yield from _lane("write", (_left(0, 0) + PITCH, top + SMS + 16), turn, top)
    for column in HELD[1]:
        yield from _arrow("write", (_middle(1, column), top + LANE), (_middle(1, column), top + HBM + 5))
    yield _text(GAP.start + 10, top + SMS + 10, "writes", "small")


def _lane(kind: str, start: tuple[float, float], turn: float, top: int) -> Iterator[str]:
    """Yield the line from SMs across the link, down, and along the lane above the destination's memory."""
    end = _middle(1, HELD[1][-1]) + 1.1
    yield f'<path class="{kind}" d="M{start[0]:g} {start[1]:g}H{turn:g}V{top + LANE}H{end:g}"/>'


def _pull(top: int) -> Iterator[str]:
    turn, y, end = GAP.start + 40, top + SMS + 16, _left(1, 0)
    for column in HELD[0]:
        x = _middle(0, column)
        yield f'<path class="read" d="M{x:g} {top + HBM + 8}V{top + LANE}"/>'
    first = _middle(0, HELD[0][-1]) - 1.1
    yield f'<path class="read" d="M{first:g} {top + LANE}H{turn}V{y}H{end - 6:g}"/>'
    yield _tip("read", (end, y), (1, 0))
    yield _text(turn + 8, top + SMS + 10, "reads", "small")
    x = _middle(1, PULLING - 1)
    lane = top + LANE
    yield f'<path class="write" d="M{x:g} {top + SMS + 27}V{lane}H{_middle(1, HELD[1][-1]) + 1.1:g}"/>'
    for column in HELD[1]:
        yield from _arrow("write", (_middle(1, column), lane), (_middle(1, column), top + HBM + 5))


def _staged(top: int) -> Iterator[str]:
    yield from _up(0, HELD[0], top)
    yield from _down(0, (1,), top)
    yield from _up(1, (1,), top)
    yield from _down(1, HELD[1], top)
    y = top + HBM + 16
    yield from _arrow("copy", (_left(0, 0) + PITCH, y), (_left(1, 0), y))
    yield _text(GAP.start + len(GAP) / 2, y - 10, "copy engine", "small", anchor="middle")


def _up(side: int, columns: Sequence[int], top: int) -> Iterator[str]:
    for column in columns:
        x = _middle(side, column)
        yield from _arrow("read", (x, top + HBM + 8), (x, top + SMS + 27))


def _down(side: int, columns: Sequence[int], top: int) -> Iterator[str]:
    for column in columns:
        x = _middle(side, column)
        yield from _arrow("write", (x, top + SMS + 27), (x, top + HBM + 5))


def _left(side: int, column: float) -> float:
    """Return the left edge of a column, in pixels. Columns are counted from the link."""
    return LEFTS[1] + EDGE + PITCH * column if side else LEFTS[0] + GPU - EDGE - PITCH * (column + 1)


def _middle(side: int, column: float) -> float:
    return _left(side, column) + PITCH / 2


def _square(kind: str, side: int, column: int, top: int, height: int, columns: int = 1) -> str:
    x = _left(side, column if side else column + columns - 1) + 1.5
    return f'<rect class="{kind}" x="{x:g}" y="{top}" width="{PITCH * columns - 3}" height="{height}" rx="2"/>'


def _arrow(kind: str, start: tuple[float, float], end: tuple[float, float]) -> Iterator[str]:
    """Yield a straight arrow, along one axis of the page."""
    step = tuple((b > a) - (b < a) for a, b in zip(start, end, strict=True))
    stop = tuple(b - 6 * s for b, s in zip(end, step, strict=True))
    yield f'<path class="{kind}" d="M{start[0]:g} {start[1]:g}L{stop[0]:g} {stop[1]:g}"/>'
    yield _tip(kind.partition(" ")[0], end, (step[0], step[1]))


def _tip(kind: str, end: tuple[float, float], step: tuple[int, int]) -> str:
    (x, y), (a, b) = end, step
    points = ((x, y), (x - 8 * a - 4 * b, y - 8 * b - 4 * a), (x - 8 * a + 4 * b, y - 8 * b + 4 * a))
    return f'<polygon class="{kind}-tip" points="{" ".join(f"{px:g},{py:g}" for px, py in points)}"/>'


def _text(x: float, y: float, words: str, kind: str, anchor: str = "start") -> str:
    return f'<text class="{kind}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(words)}</text>'


if __name__ == "__main__":
    PICTURE.write_text(drawn(), encoding="utf-8")
