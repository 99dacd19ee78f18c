"""The table of limits in the documents: what is asked for, and in how many recorded runs it holds."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.record import number_with_unit

MARKS = "<!-- engine limits -->", "<!-- end of engine limits -->"


class Met(NamedTuple):
    """A limit in one recorded run.

    Attributes:
        room: how far the figure is within its limit, as a share of the limit; negative if it is not.
        row: the row of the record; see :class:`benchmarks.record.Row`.
        run: file of the run.
    """

    room: float
    row: Mapping[str, Any]
    run: Path


def met(results: Sequence[Path]) -> Iterator[Met]:
    """Yield the limits of recorded runs that compare something."""
    for result in results:
        for row in json.loads(result.read_text())["rows"]:
            if row["ok"] is not None and row["limit"] is not None:
                over = row["ours"] / row["limit"] - 1.0
                yield Met(over if row["more_is_better"] else -over, row, result)


def limits(results: Sequence[Path]) -> str:
    """Return markdown: for each limit the number of runs in which it holds, and the run in which it holds best."""
    found: dict[tuple[str, str], list[Met]] = {}
    for one in met(results):
        found.setdefault((one.row["what"], one.row["rule"]), []).append(one)
    lines = [MARKS[0], "| what | asked for | holds in | best: kvplan, limit |", "| --- | --- | --- | --- |"]
    for (what, rule), some in sorted(found.items()):
        _, row, run = max(some, key=lambda one: one.room)
        shown = ", ".join(number_with_unit(row[name], row["unit"]) for name in ("ours", "limit"))
        held = sum(one.row["ok"] for one in some)
        lines.append(f"| {what} | {rule} | {held} of {len(some)} | [{shown}](../results/engines/{run.name}) |")
    return "\n".join([*lines, MARKS[1]])
