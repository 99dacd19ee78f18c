"""``python -m benchmarks``: run the benchmarks of a CPU, print a table a group, save JSON."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from benchmarks import hostcopy, planning
from benchmarks.groups import conclude, parse, parser_for, run
from benchmarks.problems import FULL, SMOKE
from benchmarks.record import Row, cpu_model, default_path, document, machine, save

GROUPS = {
    "flat": planning.flat,
    "factored": planning.factored,
    "compile": planning.compiling,
    "import": planning.importing,
    "hostcopy": hostcopy.copying,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; 0 where all groups ran, 1 where one did not, 2 for usage."""
    chosen = parse(parser_for("benchmarks", __doc__, GROUPS), arguments, GROUPS)
    scale, started = SMOKE if chosen.smoke else FULL, machine()
    print(f"{scale.layers} layers x K,V; medians; ours/it: below 1 is faster (GB/s: above 1)\n")
    whole = not chosen.smoke and not chosen.groups
    output = chosen.output or (default_path("planning", cpu_model()) if whole else None)

    def report(rows: Sequence[Row], failed: Mapping[str, str]) -> None:
        if output is not None:
            save(output, document(rows, scale=scale, started=started, failed=dict(failed)))

    groups = {name: GROUPS[name] for name in chosen.run}
    return conclude(run(groups, scale, budget=chosen.budget, report=report), output, smoke=chosen.smoke)


if __name__ == "__main__":
    sys.exit(main())
