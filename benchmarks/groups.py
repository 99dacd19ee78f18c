"""What the commands share: their arguments, a run of groups in order, and the end of a run."""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.record import Row, table

CEILINGS = "ceilings"  # a group that is always measured, and first, so that no ratio mixes runs
Group = Callable[[Any], Iterable[Row]]
Report = Callable[[Sequence[Row], Mapping[str, str]], None]


class Result(NamedTuple):
    """All rows; and by group, why it failed or was cut short."""

    rows: list[Row]
    failed: dict[str, str]


def parser_for(command: str, words: str | None, groups: Iterable[str]) -> argparse.ArgumentParser:
    """Return the parser of a command, with the arguments that all commands have."""
    parser = argparse.ArgumentParser(prog=f"python -m {command}", description=words)
    parser.add_argument("groups", nargs="*", metavar="group", help=f"of {', '.join(groups)}; by default all")
    parser.add_argument("--smoke", action="store_true", help="tiny problems: shows that it runs, and nothing else")
    parser.add_argument("--output", type=Path, help="JSON file; by default in benchmarks/results, none for --smoke")
    parser.add_argument("--budget", type=float, default=float("inf"), metavar="SECONDS",
                        help="start no case after so long")  # fmt: skip
    return parser


def parse(
    parser: argparse.ArgumentParser, arguments: Sequence[str] | None, groups: Iterable[str]
) -> argparse.Namespace:
    """Parse; ``run`` of the result names the groups to run, in order."""
    chosen, known = parser.parse_args(arguments), list(groups)
    if unknown := sorted(set(chosen.groups) - set(known)):
        parser.error(f"no group {', '.join(unknown)}; groups are {', '.join(known)}")
    first = [CEILINGS] if CEILINGS in known else []
    chosen.run = first + [name for name in chosen.groups or known if name != CEILINGS]
    return chosen


def run(groups: Mapping[str, Group], rig: Any, *, budget: float, report: Report) -> Result:
    """Run groups in order, print each one's table as soon as it is there, and report after each.

    Rows of a group that failed, or was cut short, count; the other groups go on.
    """
    opened = time.perf_counter()
    result = Result([], {})
    for name, group in groups.items():
        rows: list[Row] = []
        start = time.perf_counter()
        try:
            for row in group(rig):
                rows.append(row)
                if time.perf_counter() - opened > budget and name != CEILINGS:
                    result.failed[name] = f"cut short after {len(rows)} rows: the budget of {budget:g} s is spent"
                    break
        except Exception as error:  # device time is scarce: one group's error must not cost the others
            result.failed[name] = f"{type(error).__name__}: {error}"
            traceback.print_exc()
        print(table(rows), end="\n\n", flush=True)
        print(f"{name}: {time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True)
        result.rows.extend(rows)
        report(result.rows, result.failed)
        if name == CEILINGS and name in result.failed:
            break
    return result


def conclude(result: Result, output: Path | None, *, smoke: bool = False) -> int:
    """Report the file, failed groups and broken figures; return the exit code. No figure of a smoke run counts."""
    if output is not None:
        print(f"saved {output}", file=sys.stderr)
    for name, reason in result.failed.items():
        print(f"not measured: {name}: {reason}", file=sys.stderr)
    broken = [] if smoke else [row for row in result.rows if row.broken]
    for row in broken:
        print(f"broken: {row.group}, {row.what}: {row.broken}", file=sys.stderr)
    return int(bool(result.failed or broken))
