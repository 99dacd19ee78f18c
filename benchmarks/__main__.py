"""``python -m benchmarks``: run the benchmarks, print a table a group, save JSON."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import footprint, hostcopy, planning
from benchmarks.problems import FULL, SMOKE
from benchmarks.record import Row, default_path, document, machine, save, table

GROUPS = {
    "flat": planning.flat,
    "factored": planning.factored,
    "compile": planning.compiling,
    "import": footprint.importing,
    "memory": footprint.memory,
    "hostcopy": hostcopy.copying,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; 0 where every limit holds, 1 where one does not, 2 for usage."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("groups", nargs="*", metavar="group", help=f"of {', '.join(GROUPS)}; by default all")
    parser.add_argument("--smoke", action="store_true", help="tiny problems: shows that it runs, and nothing else")
    parser.add_argument("--output", type=Path, help="JSON file; by default benchmarks/results/ for a full run only")
    chosen = parser.parse_args(arguments)
    unknown = sorted(set(chosen.groups) - set(GROUPS))
    if unknown:
        parser.error(f"no group {', '.join(unknown)}; groups are {', '.join(GROUPS)}")
    scale = SMOKE if chosen.smoke else FULL
    started = machine()
    rows: list[Row] = []
    print(f"{scale.layers} layers x K,V; medians; ours/it: below 1 is faster (GB/s: above 1)\n")
    for group in chosen.groups or GROUPS:
        made = GROUPS[group](scale)
        print(table(made), end="\n\n", flush=True)
        rows += made
    output = chosen.output or (None if chosen.smoke or chosen.groups else default_path())
    if output is not None:
        save(output, document(rows, scale=scale, started=started))
        print(f"saved {output}", file=sys.stderr)
    if chosen.smoke:  # limits are for real sizes
        return 0
    missed = [row for row in rows if row.ok is False]
    for row in missed:
        print(f"missed: {row.group}, {row.what}", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
