"""The table of limits in the documents: what is asked for, and in how many recorded runs it holds."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.record import number_with_unit

MARKS = "<!-- engine limits -->", "<!-- end of engine limits -->"


class Met(NamedTuple):
    """A limit in one recorded run.

    Attributes:
        what, rule: the figure, and its limit in words.
        ours, limit: both, in ``unit``.
        unit: their unit.
        ok: whether it holds.
        room: how far the figure is within its limit, as a share of the limit; negative if it is not.
        run: file of the run.
    """

    what: str
    rule: str
    ours: float
    limit: float
    unit: str
    ok: bool
    room: float
    run: Path


def met(results: Sequence[Path]) -> Iterator[Met]:
    """Yield the limits of recorded runs that compare something."""
    for result in results:
        for row in json.loads(result.read_text())["rows"]:
            if row.get("limit") is None or row.get("ok") is None:
                continue
            over = row["ours"] / row["limit"] - 1.0
            room = over if row["more_is_better"] else -over
            yield Met(row["what"], row["rule"], row["ours"], row["limit"], row["unit"], row["ok"], room, result)


def limits(results: Sequence[Path]) -> str:
    """Return markdown: for each limit the number of runs in which it holds, and the run in which it holds best."""
    found: dict[tuple[str, str], list[Met]] = {}
    for one in met(results):
        found.setdefault((one.what, one.rule), []).append(one)
    lines = [MARKS[0], "| what | asked for | holds in | best: kvplan, limit |", "| --- | --- | --- | --- |"]
    for (what, rule), some in sorted(found.items()):
        best = max(some, key=lambda one: one.room)
        shown = ", ".join(number_with_unit(value, best.unit) for value in (best.ours, best.limit))
        place = f"../results/engines/{best.run.name}"
        lines.append(f"| {what} | {rule} | {sum(one.ok for one in some)} of {len(some)} | [{shown}]({place}) |")
    return "\n".join([*lines, MARKS[1]])
