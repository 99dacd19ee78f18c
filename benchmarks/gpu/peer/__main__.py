"""``python -m benchmarks.gpu.peer``: GPU memory to GPU memory in one process, within one GPU and between GPUs.

Every limit is a share of one large copy of the same run, or a number.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.gpu.__main__ import CEILINGS, conclude, run
from benchmarks.gpu.environment import default_path, gpu, gpu_document
from benchmarks.gpu.peer.limits import FULL, SMOKE
from benchmarks.record import Row, machine, save

# Group to the module that holds it; modules load late, since they need torch.
GROUPS = {
    CEILINGS: "whole",
    "within": "whole",
    "between": "whole",
    "few": "few",
    "beside": "decode",
    "layouts": "heads",
    "resharding": "heads",
    "four": "heads",
}
LEAST, MOST = 2, 4  # GPUs


def arguments_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse; ceilings are always measured, and first, so that no ratio mixes runs."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.peer", description=__doc__)
    parser.add_argument("groups", nargs="*", metavar="group", help=f"of {', '.join(GROUPS)}; by default all")
    parser.add_argument("--smoke", action="store_true", help="tiny problems: shows that it runs, and nothing else")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: with --smoke, to try it out")
    parser.add_argument("--output", type=Path, help="JSON file; by default in benchmarks/results, none for --smoke")
    parser.add_argument("--budget", type=float, default=150.0, metavar="SECONDS",
                        help="start no case after so long (default 150)")  # fmt: skip
    chosen = parser.parse_args(arguments)
    unknown = sorted(set(chosen.groups) - set(GROUPS))
    if unknown:
        parser.error(f"no group {', '.join(unknown)}; groups are {', '.join(GROUPS)}")
    if chosen.device == "cpu" and not chosen.smoke:
        parser.error("--device cpu measures nothing; give --smoke, too")
    chosen.run = [CEILINGS, *(name for name in chosen.groups or GROUPS if name != CEILINGS)]
    return chosen


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; 0 where every limit holds, 1 where one does not or a group failed, 2 for usage or too few GPUs."""
    chosen = arguments_of(arguments)
    import torch

    from benchmarks.gpu.peer.rig import Rig
    from kvplan.cuda.peers import link_between

    started, about, gpus = machine(), dict[str, Any](), ("cpu",) * MOST
    if chosen.device == "cuda":
        count = torch.cuda.device_count()
        if count < LEAST:
            print(f"{count} CUDA devices: these benchmarks need {LEAST}", file=sys.stderr)
            return 2
        gpus = tuple(f"cuda:{ordinal}" for ordinal in range(min(count, MOST)))
        about = gpu() | {"devices": len(gpus), "link": link_between(0, 1).words}
    scale = SMOKE if chosen.smoke else FULL
    output = chosen.output or (None if chosen.smoke else default_path(about["name"], ["peer"]))
    print(f"{about}\n{scale.layers} layers x K,V; medians; ours/it: for GB/s above 1 is faster\n", flush=True)
    groups = {name: getattr(import_module(f"benchmarks.gpu.peer.{GROUPS[name]}"), name) for name in chosen.run}
    with Rig(scale, gpus) as rig:

        def report(rows: Sequence[Row], failed: Mapping[str, str]) -> None:
            if output is not None:
                made = gpu_document(rows, scale=scale, started=started, about=about, failed=failed)
                save(output, made | {"not_run": rig.not_run})

        result = run(groups, rig, budget=chosen.budget, report=report)
    for name, why in rig.not_run.items():
        print(f"not run: {name}: {why}", file=sys.stderr)
    return conclude(result, output, smoke=chosen.smoke)


if __name__ == "__main__":
    sys.exit(main())
