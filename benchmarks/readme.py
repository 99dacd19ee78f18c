"""The README's table of numbers, written from a recorded run.

python -m benchmarks.readme    # rewrites the table between its marks in README.md
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "benchmarks" / "results" / "planning-amd-epyc.json"
WORK = (
    "80 layers of K and V; `make bench` makes the whole table. Limits are for ids in int64 arrays: converting a list "
    "costs 25 ns an id. One numpy broadcast, which merges nothing and knows no other layout, writes large plans faster."
)
MARKS = "<!-- numbers -->", "<!-- end of numbers -->"

# (group, what, the number beside it that the ratio is made of)
SHOWN = (
    ("flat plan", "layer to page x 1 random", "numpy, one broadcast"),
    ("flat plan", "layer to page x 256 random", "numpy fill"),
    ("flat plan", "layer to page x 4096 random", "numpy fill"),
    ("flat plan", "layer to page x 4096 random", "numpy, one broadcast"),
    ("flat plan", "layer to page x 4096 random lists", "numpy fill"),
    ("flat plan", "layer to layer x 4096 random", "numpy fill"),
    ("flat plan", "layer to layer x 4096 consecutive", "numpy fill"),
    ("factored plan", "1 block, int64 arrays", "numpy"),
    ("factored plan", "4096 blocks, int64 arrays", "numpy"),
    ("factored plan", "4096 blocks, lists", "numpy"),
    ("compile", "32 runs each: first compile()", ""),
    ("import", "import kvplan, beyond numpy", "import numpy"),
    ("host copy", "runs of 8 KiB, 1 thread", "numpy memcpy"),
    ("host copy", "runs of 8 KiB, 2 threads", "numpy memcpy"),
)


def table(result: Path = RESULT) -> str:
    """Markdown of the rows that the README shows, and what made them."""
    record = json.loads(result.read_text())
    rows = {(row["group"], row["what"]): row for row in record["rows"]}
    machine, versions = record["machine"], record["versions"]
    name = result.relative_to(ROOT)
    made = ", ".join(f"{package} {number}" for package, number in versions.items())
    lines = [
        MARKS[0],
        f"From [{name}]({name}): {machine['cpu']}, {machine['cores']} shared cores, no GPU; {made}. {WORK}",
        "",
        "| | ours | beside it | ratio | limit |",
        "| --- | --- | --- | --- | --- |",
        *(_line(rows[group, what], group, what, beside) for group, what, beside in SHOWN),
        MARKS[1],
    ]
    return "\n".join(lines)


def _line(row: dict[str, Any], group: str, what: str, beside: str) -> str:
    unit = row["unit"]
    other = f"{beside}: {_number(row['beside'][beside])} {unit}" if beside else ""
    ratio = f"{row['ratios'][beside]:.2f}" if beside else ""
    met = {True: "", False: " (missed)", None: ""}[row["ok"]]
    return f"| {group}, {what} | {_number(row['ours'])} {unit} | {other} | {ratio} | {row['rule']}{met} |"


def _number(value: float) -> str:
    """Three digits, and no exponent."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def main() -> None:
    """Write the table into README.md."""
    readme = ROOT / "README.md"
    text = readme.read_text()
    new = re.sub(re.escape(MARKS[0]) + ".*?" + re.escape(MARKS[1]), lambda _: table(), text, flags=re.DOTALL)
    readme.write_text(new)


if __name__ == "__main__":
    main()
