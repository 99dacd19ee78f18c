"""``kvplan explain``: how two layouts compile into a copy program, pass by pass."""

from __future__ import annotations

import argparse
from typing import Any

from kvplan.cli.facts import extent_facts
from kvplan.cli.screen import print_json
from kvplan.cli.sources import add_pair, pair_of
from kvplan.facade import CopyProgram, compile  # noqa: A004
from kvplan.program import BlockAxis, Run, RunGroup

EXAMPLES = """examples:
  kvplan explain examples/specs/gpu_split_kv.toml examples/specs/host_block_first.toml
  kvplan explain "layer: kv block token head dim" "block layer kv token head dim" \\
      --sizes layer=80,block=1024,token=16,head=2,dim=128 --dst-sizes block=256,token=64"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.epilog = EXAMPLES
    add_pair(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object (schema kvplan.explain)")


def run(args: argparse.Namespace) -> int:
    """Print the program after each pass."""
    program = compile(*pair_of(args))
    if args.json:
        print_json("explain", program_facts(program))
    else:
        print(program.explain().rstrip("\n"))
    return 0


def program_facts(compiled: CopyProgram) -> dict[str, Any]:
    """The program as plain facts; bytes unless the name says otherwise."""
    program = compiled.program
    return {
        "src": {"notation": compiled.src.notation, "device": compiled.src.device},
        "dst": {"notation": compiled.dst.notation, "device": compiled.dst.device},
        "direction": compiled.direction,
        "unit_tokens": compiled.unit_tokens,
        "unit_nbytes": compiled.unit_nbytes,
        "src_units": program.src_units,
        "dst_units": program.dst_units,
        "runs": compiled.runs,
        "run_nbytes": list(compiled.run_nbytes),
        "alignment": compiled.alignment,
        "extents": {side: extent_facts(program, side) for side in ("src", "dst")},
        "groups": [_group(group) for group in program.groups],
        "text": compiled.explain(),
    }


def _group(group: RunGroup) -> dict[str, Any]:
    return {
        "src": _side(group.src, group.src_base),
        "dst": _side(group.dst, group.dst_base),
        "runs": [_run(run) for run in group.runs],
    }


def _side(axis: BlockAxis, base: int) -> dict[str, Any]:
    return {
        "base": base,
        "num_blocks": axis.num_blocks,
        "block_stride": axis.stride,
        "unit_offsets": list(axis.units),
    }


def _run(run: Run) -> dict[str, Any]:
    loops = [{"count": count, "src_stride": src, "dst_stride": dst} for count, src, dst in run.loops]
    return {"src": run.src, "dst": run.dst, "nbytes": run.nbytes, "loops": loops}
