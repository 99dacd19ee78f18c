"""``python -m benchmarks.gpu``: run the GPU's benchmarks, print a table a group, save JSON after each."""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.gpu.environment import (
    CONNECTIONS,
    MOST_CONNECTIONS,
    default_path,
    gpu,
    gpu_document,
    told_by_smi,
)
from benchmarks.gpu.required import missed
from benchmarks.gpu.sizes import FULL, SMOKE
from benchmarks.record import Row, machine, save, table

CEILINGS = "ceilings"
# Group to the module that holds it; modules load late, since they need torch.
GROUPS = {
    CEILINGS: "alone",
    "staged": "alone",
    "kernel": "alone",
    "frontier": "beside_compute",
    "copy_engine_2d": "alone",
    "copy_engine": "alone",
    "beside": "beside_compute",
    "submit": "latency",
    "small": "latency",
}
Group = Callable[[Any], Iterator[Row]]
Report = Callable[[Sequence[Row], Mapping[str, str]], None]


class Result(NamedTuple):
    """All rows; and by group, why it failed or was cut short."""

    rows: list[Row]
    failed: dict[str, str]


def arguments_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse; ceilings are always measured, and first, so that no ratio mixes runs."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("groups", nargs="*", metavar="group", help=f"of {', '.join(GROUPS)}; by default all")
    parser.add_argument("--smoke", action="store_true", help="tiny problems: shows that it runs, and nothing else")
    parser.add_argument("--output", type=Path, help="JSON file; by default benchmarks/results/gpu-<name>.json, none "
                        "for --smoke")  # fmt: skip
    parser.add_argument("--budget", type=float, default=float("inf"), metavar="SECONDS",
                        help="start no case after so long")  # fmt: skip
    chosen = parser.parse_args(arguments)
    unknown = sorted(set(chosen.groups) - set(GROUPS))
    if unknown:
        parser.error(f"no group {', '.join(unknown)}; groups are {', '.join(GROUPS)}")
    chosen.run = [CEILINGS, *(name for name in chosen.groups or GROUPS if name != CEILINGS)]
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
        except Exception as error:  # noqa: BLE001  # device time is scarce: one group's error must not cost the others
            result.failed[name] = f"{type(error).__name__}: {error}"
            traceback.print_exc()
        if rows:
            print(table(rows), end="\n\n", flush=True)
        print(f"{name}: {time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True)
        result.rows.extend(rows)
        report(result.rows, result.failed)
        if name == CEILINGS and name in result.failed:
            break
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; 0 where every limit holds, 1 where one does not or a group failed, 2 for usage or no GPU."""
    chosen = arguments_of(arguments)
    os.environ.setdefault(CONNECTIONS, MOST_CONNECTIONS)
    import torch

    if not torch.cuda.is_available():
        print("no CUDA device: these benchmarks need one", file=sys.stderr)
        return 2
    from benchmarks.gpu.rig import Rig

    scale = SMOKE if chosen.smoke else FULL
    about, started = gpu(), machine()
    output = chosen.output or (None if chosen.smoke else default_path(about["name"], chosen.groups))
    print(f"{about}\n{scale.layers} layers x K,V; medians; ours/it: for GB/s above 1 is faster\n", flush=True)

    def report(rows: Sequence[Row], failed: Mapping[str, str]) -> None:
        if not failed and {row.group for row in rows} == {CEILINGS}:
            about.update(told_by_smi())  # an idle link and idle clocks are slower than they are in use
        if output is not None:
            save(output, gpu_document(rows, scale=scale, started=started, about=about, failed=failed))

    groups = {name: getattr(import_module(f"benchmarks.gpu.{GROUPS[name]}"), name) for name in chosen.run}
    return conclude(run(groups, Rig(scale), budget=chosen.budget, report=report), output, smoke=chosen.smoke)


def conclude(result: Result, output: Path | None, *, smoke: bool) -> int:
    """Report the file, failed groups and missed limits; the exit code. A smoke run holds no limits."""
    if output is not None:
        print(f"saved {output}", file=sys.stderr)
    for name, reason in result.failed.items():
        print(f"not measured: {name}: {reason}", file=sys.stderr)
    if not smoke:
        for row in filter(missed, result.rows):
            print(f"missed: {row.group}, {row.what}", file=sys.stderr)
    return 1 if result.failed or (not smoke and any(map(missed, result.rows))) else 0


if __name__ == "__main__":
    sys.exit(main())
