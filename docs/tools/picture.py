"""Draw docs/pictures/architecture.svg from the import contract: ``python docs/tools/picture.py``.

The rooms, their order, the exception and the pure rooms come from ``.importlinter``. The words beside a room come
from the table in ``docs/evidence/architecture.md``. A test compares the picture with both.
"""

from __future__ import annotations

import configparser
import re
from html import escape
from pathlib import Path

ROOT = Path(__file__).parents[2]
PICTURE = ROOT / "docs" / "pictures" / "architecture.svg"
WIDTH, ROW, BOX = 760, 34, 26  # pixels; a row is a box and the space below it
LEFT, NAME, WORDS = 150, 120, 290  # pixels: left edge of the boxes, their width, left edge of the words
TOP = 64
# The public calls, in the order in which a value passes them, and the room that answers each.
STEPS = {"describe": "layout", "compile": "program", "plan": "plan", "submit": "execute", "driver": "cuda"}
LEGEND = "left: the calls that a value passes; blue: pure rooms, without torch, triton or CUDA; dashed: the exception"

STYLE = (
    "text{font:13px system-ui,-apple-system,'Segoe UI','DejaVu Sans',sans-serif;fill:#1b1b1b}"
    ".head{font-size:15px;font-weight:600}.room{font-weight:600}.small{font-size:11px;fill:#4d4d4d}"
    ".page{fill:#fff}.edge{fill:#eceff3;stroke:#8a94a3}.pure{fill:#d6ebf8;stroke:#0072b2}"
    ".step{fill:#0072b2}.up{fill:none;stroke:#b34700;stroke-width:1.6;stroke-dasharray:5 3}.tip{fill:#b34700}"
    "@media(prefers-color-scheme:dark){text{fill:#f0f0f0}.small{fill:#bdbdbd}.page{fill:#161616}"
    ".edge{fill:#2b2f36;stroke:#8a94a3}.pure{fill:#0e3550;stroke:#56b4e9}.step{fill:#56b4e9}"
    ".up{stroke:#e69f00}.tip{fill:#e69f00}}"
)


def contract() -> tuple[list[str], set[str], list[tuple[str, str]]]:
    """The rooms, the highest first; the pure ones; and the exceptions, as pairs: importing room, imported room."""
    file = configparser.ConfigParser()
    file.read(ROOT / ".importlinter", encoding="utf-8")
    rooms, pure = (
        file[f"importlinter:contract:{name}"][key].split()
        for name, key in (("rooms", "layers"), ("pure", "source_modules"))
    )
    lines = file["importlinter:contract:rooms"].get("ignore_imports", "").splitlines()
    upward = {tuple(module.split(".")[1] for module in line.split(" -> ")) for line in lines if " -> " in line}
    return rooms, {module.partition(".")[2] for module in pure}, sorted(upward)


def table() -> dict[str, str]:
    """The rooms of the page's table and the words beside each, in the page's order."""
    text = (ROOT / "docs" / "evidence" / "architecture.md").read_text(encoding="utf-8")
    return dict(re.findall(r"^\| \[`([a-z]+)(?:/|\.py)`\]\([^)]*\) \| ([^|]*?) \|", text, re.MULTILINE))


def drawn() -> str:
    """The picture as SVG text, for light and dark pages; nothing is loaded from elsewhere."""
    rooms, pure, upward = contract()
    words = table()
    height = TOP + ROW * len(rooms) + 16
    middle = {room: TOP + ROW * row + BOX / 2 for row, room in enumerate(rooms)}
    body = [
        f'<rect class="page" width="{WIDTH}" height="{height}"/>',
        '<text class="head" x="24" y="30">A room imports only rooms below it</text>',
        f'<text class="small" x="24" y="50">{LEGEND}</text>',
    ]
    for room, y in middle.items():
        kind = "pure" if room in pure else "edge"
        body += [
            f'<rect class="{kind}" x="{LEFT}" y="{y - BOX / 2:g}" width="{NAME}" height="{BOX}" rx="5"/>',
            f'<text class="room" x="{LEFT + NAME / 2:g}" y="{y + 5:g}" text-anchor="middle">{room}</text>',
            f'<text x="{WORDS}" y="{y + 5:g}">{escape(words.get(room, "").replace("`", ""))}</text>',
        ]
    for number, (call, room) in enumerate(STEPS.items(), start=1):
        y = middle[room]
        body += [
            f'<circle class="step" cx="{LEFT - 14}" cy="{y:g}" r="4"/>',
            f'<text x="{LEFT - 26}" y="{y + 5:g}" text-anchor="end">{number} {call}</text>',
        ]
    for lane, (importing, imported) in enumerate(upward):
        low, high, x = middle[importing], middle[imported], LEFT + NAME
        body += [
            f'<path class="up" d="M{x} {low:g}h{8 + 5 * lane}V{high:g}h-{4 + 5 * lane}"/>',
            f'<path class="tip" d="M{x} {high:g}l7 -4v8z"/>',
        ]
    exceptions = ", ".join(f"{importing} imports {imported}" for importing, imported in upward)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
            "<title>The rooms of kvplan and their order</title>",
            f"<desc>From top to bottom: {', '.join(rooms)}. Exceptions to the order: {exceptions}.</desc>",
            f"<style>{STYLE}</style>",
            *body,
            "</svg>\n",
        ]
    )


if __name__ == "__main__":
    PICTURE.write_text(drawn(), encoding="utf-8")
