"""``python -m benchmarks.choice``: does ``auto`` take the best path?

Calibrates, then measures every path and ``auto``, which has this profile, over six pairs of layouts, run lengths from
128 bytes to 1 MiB, 1 to 4,096 blocks, and both directions, and saves all of it.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.choice_findings import SHARE, WORST, findings, to_json


def show(findings: Mapping[str, Any]) -> None:
    """Print the findings."""
    rows = [("auto, measured", findings["auto"]), *findings["parts"].items(), ("model", findings["model"]),
            *((f"always {name}", one) for name, one in findings["always"].items())]  # fmt: skip
    print(f"{'':24}{'points':>7}{'within 5 %':>12}{'worst':>8}  where")
    for name, one in rows:
        print(f"{name:24}{one['points']:7}{one['near']:12.1%}{one['worst']:7.2f}x  {one['at']}")
    print(f"median error of a prediction: {findings['prediction_error']:.1%}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; 1 where a limit does not hold."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.choice", description=__doc__)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument(
        "--budget", type=float, default=math.inf, metavar="SECONDS", help="begin no point after so long"
    )
    parser.add_argument("--output", type=Path, help="JSON file to write")
    chosen = parser.parse_args(arguments)
    from benchmarks.choice_runs import measure
    from kvplan.cuda.machine import machine
    from kvplan.measure.calibrate import calibrate

    until = time.perf_counter() + chosen.budget
    profile = calibrate(machine(int(chosen.device.removeprefix("cuda:"))), chosen.device)
    points = measure(chosen.device, profile, until)
    if chosen.output:
        chosen.output.write_text(to_json(points, profile))
    judged = findings(points, profile)
    show(judged)
    return int(judged["auto"]["near"] < SHARE or judged["auto"]["worst"] > WORST)


if __name__ == "__main__":
    raise SystemExit(main())
