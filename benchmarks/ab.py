"""``python -m benchmarks.ab OLD NEW GROUP...``: run groups of two checkouts in turn, and print ratios.

    $ python -m benchmarks.ab ../before . "gpu kernel submit" peer --turns 5 --output ab.json

OLD and NEW are folders of checkouts; equal ones show the machine's own noise. A GROUP is a name of `GROUPS`, and behind
it the words that its command takes. Each turn runs both checkouts, in the other order than the turn before. A ratio is
NEW over OLD, turned so that above 1 is better. The table has the median of the turns' ratios, and the spread of all
runs of NEW over all runs of OLD. A row is worse, or better, only if 1 lies outside that spread: with five turns and no
change, that is chance in one row of 126. Exits with 1 if a row is worse by more than `--tolerance`.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks.record import commit, document, machine, save

GROUPS = {
    "planning": "benchmarks",
    "gpu": "benchmarks.gpu",
    "peer": "benchmarks.gpu.peer",
    "processes": "benchmarks.gpu.peer.processes",
    "wires": "benchmarks.wires",
    "engines": "benchmarks.engines",
}
SECONDS = 1200  # for one run of one group

Rows = Mapping[str, Mapping[str, Any]]  # rows of a run by their group and words


class Ratio(NamedTuple):
    """NEW over OLD of one row, above 1 where NEW is better."""

    row: str
    unit: str
    old: float
    new: float
    median: float
    least: float
    most: float

    @property
    def verdict(self) -> str:
        """What the runs say: 1 within their spread is no change."""
        if self.least <= 1 <= self.most:
            return "no change"
        return "better" if self.median > 1 else "worse"


def arguments_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.ab", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("old", type=Path, help="folder of the checkout before")
    parser.add_argument("new", type=Path, help="folder of the checkout after")
    parser.add_argument("groups", nargs="+", metavar="group", help=f"of {', '.join(GROUPS)}, with arguments in quotes")
    parser.add_argument("--turns", type=int, default=5, help="runs of each checkout; default 5")
    parser.add_argument("--tolerance", type=float, default=0.01, help="share by which a row may be worse; default 0.01")
    parser.add_argument("--output", type=Path, help="JSON file with every run's figures")
    chosen = parser.parse_args(arguments)
    for folder in (chosen.old, chosen.new):
        if not (folder / "benchmarks" / "record.py").is_file():
            parser.error(f"{folder} is not a checkout: it has no benchmarks/record.py")
    if chosen.turns < 1:
        parser.error(f"--turns is {chosen.turns}; give 1 or more")
    chosen.commands = {group: command(group) for group in chosen.groups if shlex.split(group)[:1]}
    unknown = [group for group in chosen.groups if chosen.commands.get(group) is None]
    if unknown:
        parser.error(f"no group {', '.join(map(repr, unknown))}; groups are {', '.join(GROUPS)}")
    return chosen


def command(group: str) -> list[str] | None:
    """Arguments of Python that run a group.

    >>> command("gpu kernel --budget 60")
    ['-m', 'benchmarks.gpu', 'kernel', '--budget', '60']
    """
    name, *words = shlex.split(group)
    return ["-m", GROUPS[name], *words] if name in GROUPS else None


def run(checkout: Path, python: Sequence[str]) -> Rows:
    """Run a command in a checkout, and return its rows.

    A missed limit of the benchmark is no error here: ratios judge.

    Raises:
        RuntimeError: it saved no result.
    """
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        words = [sys.executable, *python, "--out", str(result)]  # every benchmark takes --output, or --out alone
        paths = os.pathsep.join([str(checkout.resolve()), *filter(None, [os.environ.get("PYTHONPATH")])])
        done = subprocess.run(  # the words are ours and the caller's
            words,
            cwd=checkout,
            env=os.environ | {"PYTHONPATH": paths},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=SECONDS,
            check=False,
            text=True,
        )
        if not result.exists():
            raise RuntimeError(f"{checkout}: {shlex.join(words)} ended with {done.returncode}:\n{done.stdout[-2000:]}")
        return {f"{row['group']}: {row['what']}": row for row in json.loads(result.read_text())["rows"]}


def in_turn(old: Path, new: Path, python: Sequence[str], turns: int) -> Iterator[tuple[Rows, Rows]]:
    """Run both checkouts ``turns`` times; each turn begins with the one that ended the turn before."""
    for turn in range(turns):
        first, second = (run(checkout, python) for checkout in ((new, old) if turn % 2 else (old, new)))
        yield (second, first) if turn % 2 else (first, second)
        print(f"turn {turn + 1} of {turns}: {shlex.join(python)}", file=sys.stderr, flush=True)


def ratios(pairs: Sequence[tuple[Rows, Rows]]) -> list[Ratio]:
    """Compare the rows that every run has.

    >>> slow, fast = ({"copy: 8 KiB": {"ours": ours, "unit": "us", "more_is_better": False}} for ours in (12.0, 10.0))
    >>> [ratio] = ratios([(slow, fast), (slow, fast)])
    >>> round(ratio.median, 3), ratio.verdict
    (1.2, 'better')
    """
    found = []
    for name, first in pairs[0][0].items():
        both = [(old[name]["ours"], new[name]["ours"]) for old, new in pairs if name in old and name in new]
        if len(both) < len(pairs) or not all(old and new for old, new in both):
            continue
        turned = both if first["more_is_better"] else [(1 / old, 1 / new) for old, new in both]
        before, after = zip(*turned, strict=True)
        found.append(
            Ratio(
                row=name,
                unit=first["unit"],
                old=median(old for old, _ in both),
                new=median(new for _, new in both),
                median=median(new / old for old, new in turned),
                least=min(after) / max(before),
                most=max(after) / min(before),
            )
        )
    return found


def missing(pairs: Sequence[tuple[Rows, Rows]]) -> list[str]:
    """Rows that some run lacks."""
    runs = [side for pair in pairs for side in pair]
    return sorted(set().union(*runs) - set(runs[0]).intersection(*runs))


def table(compared: Iterable[Ratio]) -> str:
    """A line a row: both medians, the ratio, its spread and the verdict."""
    compared = list(compared)
    width = max((len(ratio.row) for ratio in compared), default=0)
    return "\n".join(
        f"{ratio.row:{width}}  {ratio.old:10.5g} {ratio.new:10.5g} {ratio.unit:8}  "
        f"{ratio.median:.3f}  [{ratio.least:.3f} .. {ratio.most:.3f}]  {ratio.verdict}"
        for ratio in compared
    )


def entry(compared: Sequence[Ratio], pairs: Sequence[tuple[Rows, Rows]]) -> dict[str, Any]:
    """One group in the file: its ratios, and all runs, old and new in turn."""
    return {
        "rows": [ratio._asdict() | {"verdict": ratio.verdict} for ratio in compared],
        "runs": [{name: row["ours"] for name, row in side.items()} for pair in pairs for side in pair],
    }


def keep(chosen: argparse.Namespace, record: Mapping[str, Any], started: Any) -> None:
    """Save what is measured so far, if a file is named."""
    if chosen.output:
        made = document([], scale=None, started=started) | {"groups": record, "turns": chosen.turns}
        save(chosen.output, made | {"old": commit(chosen.old), "new": commit(chosen.new)})


def main(arguments: Sequence[str] | None = None) -> int:
    """Run and compare; 0 where nothing is worse, 1 where a row is, 2 for usage."""
    chosen = arguments_of(arguments)
    started, worse, record = machine(), list[str](), dict[str, Any]()
    for group, python in chosen.commands.items():
        pairs = list[tuple[Rows, Rows]]()
        for pair in in_turn(chosen.old, chosen.new, python, chosen.turns):
            pairs.append(pair)  # a run that is cut off later has saved these turns
            record[group] = entry(ratios(pairs), pairs)
            keep(chosen, record, started)
        compared = ratios(pairs)
        print(f"{group}: old, new, ratio (above 1: new is better), [least .. most] in {chosen.turns} turns")
        print(table(compared))
        if compared:
            print(f"median of all rows: {median(ratio.median for ratio in compared):.3f}\n", flush=True)
        for name in missing(pairs):
            print(f"not in every run: {name}", file=sys.stderr)
        worse += [r.row for r in compared if r.verdict == "worse" and r.median < 1 - chosen.tolerance]
    for name in worse:
        print(f"worse: {name}", file=sys.stderr)
    return bool(worse)


if __name__ == "__main__":
    sys.exit(main())
