"""The table of whole engines on a GPU in the documents, from a recorded run; ``python -m benchmarks.readme`` writes it.

The run is of the tests: ``tests/whole_engines/summary.py`` names its command.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from benchmarks.engines.pages import source_of

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "evidence" / "whole-engines.md"
RESULT = ROOT / "benchmarks" / "results" / "whole_engines" / "nvidia-h200.json"
MARKS = "<!-- whole engines -->", "<!-- end of whole engines -->"
NOTHING = ("", "nan")


def pages() -> Iterator[tuple[Path, tuple[str, str], str]]:
    """Yield the page, the marks in it, and what stands between."""
    yield PAGE, MARKS, table()


def table(result: Path = RESULT) -> str:
    """Return markdown of all rows, and of what made them.

    >>> print(table().splitlines()[3])
    | case | tokens | stored, MB | loaded, MB | hits of the host | preemptions | failures |
    """
    record = json.loads(result.read_text())
    columns = list(record["rows"][0])
    source = source_of(result, record["gpu"], record["versions"])
    lines = [MARKS[0], source, "", f"| {' | '.join(columns)} |", f"|{' --- |' * len(columns)}"]
    lines += [f"| {' | '.join('' if row[key] in NOTHING else row[key] for key in columns)} |" for row in record["rows"]]
    return "\n".join([*lines, MARKS[1]])
