"""The tables of transfers between two processes, in the documents, written from a recorded run.

``python -m benchmarks.readme`` writes them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.gpu.peer.process_rows import (
    BESIDE,
    BETTER,
    BETWEEN,
    BLOCK,
    COPY,
    HOST,
    INTERFACE,
    MEETING,
    NIXL,
    ONE,
    WITH_NIXL,
)
from benchmarks.peer_tables import gpus
from benchmarks.readme import PROCESSES_RESULT, ROOT, Shown, table_of

AGENTS, ENGINES = (ROOT / "docs" / name for name in ("processes/agents.md", "start/nixl.md"))
MARKS = "<!-- process numbers -->", "<!-- end of process numbers -->"
INTERFACE_MARKS = "<!-- interface numbers -->", "<!-- end of interface numbers -->"
WORK = (
    "Random blocks of 160 runs, 268 to 336 MB; the pool is another process's, on the other GPU. "
    "`python -m benchmarks.gpu.peer.processes` makes the whole table."
)
INTERFACE_WORK = (
    "40,960 rows of 8 KiB at random places, 336 MB; lists prepared before, and one strided row for each of 80 layers, "
    "as vLLM makes them. `python -m benchmarks.gpu.peer.processes` makes it."
)
SIZES = ("2 KiB", "8 KiB", "64 KiB", "1 MiB")
RATES: Shown = tuple(
    (f"{way}, runs of {size}", BETWEEN, f"{way}, {size}", ONE) for size in SIZES for way in ("push", "pull")
)
GAINS: Shown = tuple(
    (f"{way}, runs of {size}", BESIDE, f"{way}, {size}", BETTER) for size in SIZES[1:] for way in ("push", "pull")
)
POOLS: Shown = tuple(
    (f"host pools, {way}, runs of {size}", HOST, f"{way}, {size}", ONE)
    for size in SIZES[1:3]
    for way in ("push", "pull")
)
TIMES: Shown = (
    ("one block of 1.3 MB, until the other process has seen its note", BLOCK, "submit to seen", ""),
    ("its submit", BLOCK, "submit", ""),
    (f"the same {WITH_NIXL}", BLOCK, f"submit to seen, {WITH_NIXL}", ""),
    (f"the submit {WITH_NIXL}", BLOCK, f"submit, {WITH_NIXL}", ""),
    ("a meeting", MEETING, "one allocation", ""),
    ("a meeting, 80 allocations", MEETING, "80 allocations", ""),
)
THROUGH: Shown = tuple(
    (f"{operation}, {words}", INTERFACE, f"{operation}{what}", baseline)
    for operation in ("READ", "WRITE")
    for words, what, baseline in (
        ("the next ones posted before the last has ended", ", 4 in flight", COPY),
        ("from posting it until its last byte has moved", ", to the last byte", COPY),
        ("from posting it until its end is seen", ", after the make", COPY),
        ("one at a time, from making it until its end is seen", ", one at a time", NIXL),
        ("posting it", ": post", NIXL),
        ("making it", ": make", NIXL),
    )
)


def pages() -> Iterator[tuple[Path, tuple[str, str], str]]:
    """The pages, the marks in them, and what stands between."""
    yield AGENTS, MARKS, agents_table()
    yield ENGINES, INTERFACE_MARKS, interface_table()


def agents_table(result: Path = PROCESSES_RESULT) -> str:
    """Markdown of all transfers between two processes; "" before a run is recorded."""
    return _made(result, WORK, (*RATES, *GAINS, *TIMES, *POOLS), MARKS)


def interface_table(result: Path = PROCESSES_RESULT) -> str:
    """Markdown of transfers through NIXL's interface; "" before a run is recorded."""
    return _made(result, INTERFACE_WORK, THROUGH, INTERFACE_MARKS)


def _made(result: Path, work: str, shown: Shown, marks: tuple[str, str]) -> str:
    """A table of the rows that the run has: without NIXL, rows beside it are left out."""
    if not result.exists():
        return ""
    rows: dict[tuple[str, str], dict[str, Any]] = {
        (row["group"], row["what"]): row for row in json.loads(result.read_text())["rows"]
    }
    there = [one for one in shown if one[1:3] in rows and (not one[3] or one[3] in rows[one[1:3]]["beside"])]
    return table_of(result, gpus, work, there, marks)
