"""Draw docs/pictures/agents.svg, two processes and what is between them: ``python docs/tools/agents_picture.py``."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import NamedTuple

PICTURE = Path(__file__).parents[2] / "docs" / "pictures" / "agents.svg"
WIDTH = 860
LEFT, RIGHT, BOX = 24, 536, 300  # pixels: left edges of the two processes, and their width
TOP, HEIGHT = 76, 190  # of the upper half: who maps what
LANES = 130, 430, 730  # pixels: middles of the three lanes of the lower half
START, STEP = 356, 44  # pixels: top of the lower half's first step, and the distance of two steps


class Step(NamedTuple):
    """One step of a transfer: the lane it starts in, the lane it goes to (or the same), and words."""

    lane: int
    to: int
    words: str
    kind: str = "write"


ACTORS = ("visitor: user's thread", "visitor: executor and settling thread", "owner")
STEPS = (
    Step(0, 1, "submit(plan, after=, note=): returns at once"),
    Step(1, 1, "waits for after=", "wait"),
    Step(1, 2, "move the bytes: the owner makes no call"),
    Step(1, 2, "last byte: does the owner live? (pidfd, socket)", "read"),
    Step(1, 2, "then the note, over the socket"),
    Step(1, 0, "done(), synchronize(): the transfer has ended"),
    Step(2, 2, "notes(): blocks are free, or here", "wait"),
    Step(2, 1, "close(): tells that it closes, and waits", "read"),
    Step(1, 2, "goodbye, when nothing is in flight"),
)
STYLE = (
    "text{font:13px system-ui,-apple-system,'Segoe UI','DejaVu Sans',sans-serif;fill:#1b1b1b}"
    ".head{font-size:15px;font-weight:600}.name{font-weight:600}.small{font-size:11px;fill:#4d4d4d}"
    ".page{fill:#fff}.box{fill:#f4f6f8;stroke:#8a94a3}.part{fill:#fff;stroke:#8a94a3}.file{fill:#56b4e9}"
    ".lane{stroke:#8a94a3;stroke-dasharray:3 4}.read,.write,.wait{fill:none;stroke-width:2.2}"
    ".read{stroke:#0072b2}.write{stroke:#d55e00}.wait{stroke:#a3457c;stroke-dasharray:7 4}"
    ".read-tip{fill:#0072b2}.write-tip{fill:#d55e00}.wait-tip{fill:#a3457c}"
    "@media(prefers-color-scheme:dark){text{fill:#f0f0f0}.small{fill:#bdbdbd}.page{fill:#161616}"
    ".box{fill:#22262c}.part{fill:#161616}.file{fill:#1f5f86}.read{stroke:#56b4e9}.read-tip{fill:#56b4e9}"
    ".write{stroke:#ff8c42}.write-tip{fill:#ff8c42}.wait{stroke:#e59ac4}.wait-tip{fill:#e59ac4}}"
)


def drawn() -> str:
    """Return the picture as SVG text, for light and dark pages. It loads no other files."""
    height = START + STEP * len(STEPS) + 24
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
            "<title>Two agents: who maps what, and who waits for whom</title>",
            f"<desc>{escape('. '.join(step.words for step in STEPS))}</desc>",
            f"<style>{STYLE}</style>",
            f'<rect class="page" width="{WIDTH}" height="{height}"/>',
            *_maps(),
            *_steps(height),
            "</svg>\n",
        ]
    )


def _maps() -> Iterator[str]:
    yield text(24, 34, "Who maps what", "head")
    yield text(
        24, 56, "The owner's memory is mapped into the visitor; nothing of the visitor is mapped into the owner."
    )
    for x, name, process in ((LEFT, "visitor", "agent.meet(card)"), (RIGHT, "owner", "agent.card()")):
        yield f'<rect class="box" x="{x}" y="{TOP}" width="{BOX}" height="{HEIGHT}" rx="8"/>'
        yield text(x + 14, TOP + 24, name, "name")
        yield text(x + BOX - 14, TOP + 24, process, "small", "end")
    yield from _part(LEFT + 14, TOP + 40, 130, 56, "its own layout", "any memory")
    yield from _part(LEFT + 156, TOP + 40, 130, 56, "peer.layouts[...]", "its mapping", kind="file")
    yield from _part(LEFT + 14, TOP + 120, 272, 48, "Executor", "reads one side, writes the other")
    yield from _part(RIGHT + 14, TOP + 40, 272, 56, "pool", "GPU memory, or a file in memory", kind="file")
    yield from _part(RIGHT + 14, TOP + 120, 272, 48, "service thread", "greets, hands over, waits for goodbyes")
    yield from arrow("write", (LEFT + 79, TOP + 119), (LEFT + 79, TOP + 97))
    yield from arrow("write", (LEFT + 221, TOP + 119), (LEFT + 221, TOP + 97))
    yield from arrow("write", (LEFT + 286, TOP + 68), (RIGHT + 13, TOP + 68))
    yield text((LEFT + BOX + RIGHT) / 2, TOP + 58, "same bytes: cuda_ipc, shm", "small", "middle")
    yield from arrow("read", (RIGHT + 14, TOP + 144), (LEFT + 287, TOP + 144))
    yield text((LEFT + BOX + RIGHT) / 2, TOP + 134, "socket: proofs, descriptors,", "small", "middle")
    yield text((LEFT + BOX + RIGHT) / 2, TOP + 162, "notes, goodbye", "small", "middle")


def _steps(height: int) -> Iterator[str]:
    yield text(24, START - 52, "Who waits for whom", "head")
    for x, name in zip(LANES, ACTORS, strict=True):
        yield text(x, START - 24, name, "name", "middle")
        yield f'<path class="lane" d="M{x} {START - 14}V{height - 16}"/>'
    for number, step in enumerate(STEPS):
        y = START + STEP * number + 20
        a, b = LANES[step.lane], LANES[step.to]
        if a == b:
            yield f'<rect class="part" x="{a - 6}" y="{y - 12}" width="12" height="18" rx="3"/>'
            yield text(a, y - 16, step.words, "small", "middle")
        else:
            yield from arrow(step.kind, (a, y), (b, y))
            yield text((a + b) / 2, y - 8, step.words, "small", "middle")


def _part(x: float, y: float, width: int, height: int, name: str, words: str, kind: str = "part") -> Iterator[str]:
    yield f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width}" height="{height}" rx="5"/>'
    yield text(x + width / 2, y + height / 2 - 3, name, "name", "middle")
    yield text(x + width / 2, y + height / 2 + 14, words, "small", "middle")


def arrow(kind: str, start: tuple[float, float], end: tuple[float, float]) -> Iterator[str]:
    """Yield a straight arrow, along one axis of the page."""
    a, b = ((q > p) - (q < p) for p, q in zip(start, end, strict=True))
    x, y = end
    yield f'<path class="{kind}" d="M{start[0]:g} {start[1]:g}L{x - 6 * a:g} {y - 6 * b:g}"/>'
    points = ((x, y), (x - 8 * a - 4 * b, y - 8 * b - 4 * a), (x - 8 * a + 4 * b, y - 8 * b + 4 * a))
    yield f'<polygon class="{kind}-tip" points="{" ".join(f"{px:g},{py:g}" for px, py in points)}"/>'


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    """Return a line of words."""
    named = f' class="{kind}"' if kind else ""
    return f'<text{named} x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(words)}</text>'


if __name__ == "__main__":
    PICTURE.write_text(drawn(), encoding="utf-8")
