"""``python -m benchmarks.gpu``: run the GPU's benchmarks, print a table a group, save JSON after each."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from benchmarks.gpu.environment import CONNECTIONS, MOST_CONNECTIONS, PACKAGES, gpu, told_by_smi
from benchmarks.gpu.sizes import HOST_SMOKE, HostScale, Scale
from benchmarks.groups import CEILINGS, conclude, parse, parser_for, run
from benchmarks.record import Row, default_path, document, machine, save

# Group to the module and the function; modules load late, since they need torch.
GROUPS = {
    CEILINGS: "benchmarks.gpu.alone:ceilings",
    "staged": "benchmarks.gpu.alone:staged",
    "kernel": "benchmarks.gpu.alone:kernel",
    "copy_engine_2d": "benchmarks.gpu.alone:copy_engine_2d",
    "copy_engine": "benchmarks.gpu.alone:copy_engine",
    "beside": "benchmarks.gpu.beside:beside",
    "submit": "benchmarks.gpu.few:submit",
    "small": "benchmarks.gpu.few:small",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; 0 where all groups ran, 1 where one failed or a figure is broken, 2 for usage or no GPU."""
    chosen = parse(parser_for("benchmarks.gpu", __doc__, GROUPS), arguments, GROUPS)
    os.environ.setdefault(CONNECTIONS, MOST_CONNECTIONS)
    import torch

    if not torch.cuda.is_available():
        print("no CUDA device: these benchmarks need one", file=sys.stderr)
        return 2
    return measure(chosen, GROUPS, HOST_SMOKE if chosen.smoke else HostScale(), ["cuda:0"], gpu(), *chosen.groups)


def measure(
    chosen: argparse.Namespace, groups: Mapping[str, str], scale: Scale, gpus: Sequence[str], about: dict[str, Any],
    *topic: str,
) -> int:  # fmt: skip
    """Run the chosen groups on some GPUs, save after each, and return the exit code.

    Args:
        chosen: the parsed arguments.
        groups: all groups of the command.
        scale, gpus: see :class:`benchmarks.gpu.rig.Rig`.
        about: facts of the GPUs.
        topic: words of the default file's name.
    """
    from benchmarks.gpu.rig import Rig

    started = machine() | {"gpu": about}
    output = chosen.output or (None if chosen.smoke else default_path("gpu", about["name"], *topic))
    print(f"{about}\n{scale.layers} layers x K,V; medians; ours/it: for GB/s above 1 is faster\n", flush=True)
    places = {name: groups[name].split(":") for name in chosen.run}
    with Rig(scale, gpus) as rig:

        def report(rows: Sequence[Row], failed: Mapping[str, str]) -> None:
            if not failed and {row.group for row in rows} == {CEILINGS}:
                about.update(told_by_smi())  # an idle link and idle clocks are slower than they are in use
            if output is not None:
                save(output, document(rows, started=started, scale=scale, packages=PACKAGES, failed=dict(failed),
                                      not_run=rig.not_run))  # fmt: skip

        functions = {name: getattr(import_module(module), word) for name, (module, word) in places.items()}
        result = run(functions, rig, budget=chosen.budget, report=report)
    for name, why in rig.not_run.items():
        print(f"not run: {name}: {why}", file=sys.stderr)
    return conclude(result, output, smoke=chosen.smoke)


if __name__ == "__main__":
    sys.exit(main())
