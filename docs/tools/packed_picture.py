"""Draw docs/pictures/packed.svg, a packed transfer of two processes: ``python -m docs.tools.packed_picture``."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from pathlib import Path

from docs.tools.agents_picture import STYLE as BASE
from docs.tools.agents_picture import arrow, text

PICTURE = Path(__file__).parents[2] / "docs" / "pictures" / "packed.svg"
WIDTH, HEIGHT = 860, 456
CHUNKS, SLOTS = 6, 3
LEFT, STEP, BOX = 210, 96, 40  # pixels: where the first chunk begins, from chunk to chunk, and height of a box
ROWS = {  # the top of each row in pixels, and its two lines of words
    "ask": (96, "receiver: submit()", "asks, with a recipe"),
    "gather": (166, "sender's GPU", "gathers into a slot"),
    "wire": (236, "wire", "one write, then its note"),
    "scatter": (306, "receiver's GPU", "scatters from the slot"),
    "credit": (376, "credit", "the slot is free again"),
}
WIDTHS = {"gather": 34, "wire": 88, "scatter": 34}  # pixels: the wire takes the longest, so it is never idle
STYLE = BASE + (
    ".s0{fill:#56b4e9}.s1{fill:#e69f00}.s2{fill:#8fd3b6}"
    "@media(prefers-color-scheme:dark){.s0{fill:#1f5f86}.s1{fill:#8a5f00}.s2{fill:#2c6b54}}"
)
WORDS = (
    "The receiver asks. The sender gathers chunk after chunk into slots, and writes each slot to the receiver. The "
    "receiver scatters it and gives the slot back, so that chunk 4 waits for the slot of chunk 1."
)


def drawn() -> str:
    """Return the picture as SVG text, for light and dark pages. It loads no other files."""
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
            "<title>A packed transfer: who gathers, writes and scatters, and who waits for whom</title>",
            f"<desc>{escape(WORDS)}</desc>",
            f"<style>{STYLE}</style>",
            f'<rect class="page" width="{WIDTH}" height="{HEIGHT}"/>',
            text(24, 34, f"A pull of {CHUNKS} chunks through {SLOTS} slots; a colour is a slot", "head"),
            text(24, 56, "Time runs to the right. The wire takes the longest, so gather and scatter hide behind it."),
            *_rows(),
            *_chunks(),
            "</svg>\n",
        ]
    )


def _rows() -> Iterator[str]:
    for top, name, words in ROWS.values():
        yield text(24, top + 17, name, "name")
        yield text(24, top + 33, words, "small")
        yield f'<path class="lane" d="M{LEFT - 16} {top + BOX / 2:g}H{WIDTH - 16}"/>'


def _chunks() -> Iterator[str]:
    ask, gather, wire, scatter, credit = (top for top, _, _ in ROWS.values())
    yield f'<rect class="part" x="{LEFT - 14}" y="{ask + 8}" width="24" height="24" rx="4"/>'
    yield text(LEFT + 20, ask + 16, "recipe of the sender's half: its own addresses, runs, bytes", "small")
    yield from arrow("read", (LEFT - 2, ask + 33), (LEFT - 2, gather - 1))
    for number in range(CHUNKS):
        moves = LEFT + 42 + STEP * number
        gathers = moves - 44 if number < SLOTS else moves - 38
        arrives = moves + WIDTHS["wire"]
        for row, x, top in (("gather", gathers, gather), ("wire", moves, wire), ("scatter", arrives + 4, scatter)):
            if x + WIDTHS[row] <= WIDTH:
                yield from _box(number, x, top, WIDTHS[row])
        if number < SLOTS:  # the slot goes back, and chunk number + SLOTS is gathered into it
            yield from arrow("wait", (arrives + 20, scatter + BOX), (arrives + 20, credit + 12))
            yield text(arrives + 26, credit + 36, f"slot of {number + 1} free", "small")


def _box(number: int, x: float, top: float, width: float) -> Iterator[str]:
    yield f'<rect class="s{number % SLOTS}" x="{x:g}" y="{top}" width="{width}" height="{BOX}" rx="4"/>'
    yield text(x + width / 2, top + BOX / 2 + 5, str(number + 1), "name", "middle")


if __name__ == "__main__":
    PICTURE.write_text(drawn(), encoding="utf-8")
