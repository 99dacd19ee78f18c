"""``python -m benchmarks.choice``: does ``auto`` take the best path, and always the same one?

Calibrates several times in a row. Then it measures every path and ``auto``, which has the last of these profiles, over
six pairs of layouts, run lengths from 128 bytes to 1 MiB, 1 to 4,096 blocks, and both directions, and saves all of it.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.choice_findings import SHARE, WORST, findings, from_file, to_json

CALIBRATIONS = 3


def show(found: Mapping[str, Any], runs: Sequence[Mapping[str, Any]]) -> None:
    """Print the findings."""
    rows = [("auto, measured", found["auto"]), *found["parts"].items(),
            *((f"model {k + 1}", one) for k, one in enumerate(found["model"])),
            *((f"always {name}", one) for name, one in found["always"].items())]  # fmt: skip
    print(f"{'':24}{'points':>7}{'within 5 %':>12}{'worst':>8}  where")
    for name, one in rows:
        print(f"{name:24}{one['points']:7}{one['near']:12.1%}{one['worst']:7.2f}x  {one['at']}")
    print(f"{len(found['model'])} calibrations take the same path on {found['agreement']:.1%} of the grid")
    print(f"median error of a prediction: {found['prediction_error']:.1%}")
    for run in runs:
        print(
            f"calibrated in {run['seconds']:.1f} s, with {run['gpu_mb']:.0f} MB of the GPU,"
            f" {run['host_mb']:.0f} MB of the host"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, or judge an earlier run; 1 where a limit does not hold."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.choice", description=__doc__)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--calibrations", type=int, default=CALIBRATIONS)
    parser.add_argument(
        "--budget", type=float, default=math.inf, metavar="SECONDS", help="begin no point after so long"
    )
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--again", type=Path, metavar="FILE", help="measure nothing; judge this file anew")
    parser.add_argument("--refit", action="store_true", help="with --again: fit the profiles anew from their samples")
    chosen = parser.parse_args(arguments)
    if chosen.again:
        points, profiles = from_file(chosen.again)
        runs: Sequence[Mapping[str, Any]] = json.loads(chosen.again.read_text())["calibrations"]
        if chosen.refit:
            from benchmarks.choice_runs import refitted

            profiles = refitted(runs, profiles)
    else:
        until = time.perf_counter() + chosen.budget
        from benchmarks.choice_runs import calibrations, measure

        profiles, runs = calibrations(chosen.device, chosen.calibrations)
        points = measure(chosen.device, profiles[-1], until)
    if chosen.output:
        chosen.output.write_text(to_json(points, profiles, runs))
    found = findings(points, profiles)
    show(found, runs)
    auto = found["auto"]
    return int(auto["near"] < SHARE or auto["worst"] > WORST or found["agreement"] < SHARE)


if __name__ == "__main__":
    raise SystemExit(main())
