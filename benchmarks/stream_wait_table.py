"""The table of who waits for the slots of a ring, in the GPU guide, written from a recorded run.

``python -m benchmarks.readme`` writes it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from benchmarks.readme import GPU_PAGE, GPU_RESULT, ROOT

RESULT = GPU_RESULT.with_name("gpu-nvidia-h200-stream-waits.json")
MARKS = "<!-- stream wait numbers -->", "<!-- end of stream wait numbers -->"


def pages() -> Iterator[tuple[Path, tuple[str, str], str]]:
    """Yield the page, the marks in it, and what stands between."""
    yield GPU_PAGE, MARKS, stream_wait_table()


def stream_wait_table(result: Path = RESULT) -> str:
    """Markdown of the GB/s of copies through a ring, by who waits for its slots: the median, the least and the most."""
    record = json.loads(result.read_text())
    gpu, name = record["machine"]["gpu"], result.relative_to(ROOT)
    rows, torch = record["rows"], record["versions"]["torch"]
    ways = list(rows[0]["detail"])
    first = (
        f"From [{name}](../../{name}): {gpu['name']}, driver {gpu['driver']}, torch {torch}. GB/s, median; in brackets "
        f"the least and the most of {len(rows[0]['detail'][ways[0]])} runs."
    )
    lines = [
        MARKS[0],
        first,
        "",
        f"| | {' | '.join(ways)} |",
        "| --- |" + " --- |" * len(ways),
    ]
    for row in rows:
        speeds = {**row["beside"], row["what"].split(", ")[1]: row["ours"]}
        cells = [f"{speeds[way]:.1f} ({min(row['detail'][way]):.1f} to {max(row['detail'][way]):.1f})" for way in ways]
        lines.append(f"| {row['what'].split(', ')[0]} | {' | '.join(cells)} |")
    return "\n".join([*lines, MARKS[1]])
