"""``kvplan explain``: print the copy program of two layouts pass by pass, and the path that a plan would take."""

from __future__ import annotations

import argparse
from shutil import get_terminal_size
from typing import Any

from kvplan.cli.answers.layout_facts import extent_facts, picked, side_facts, unwritten_facts
from kvplan.cli.answers.plan_facts import candidates_of, plan_of
from kvplan.cli.arguments.sources import SIDES, add_blocks, add_pair, add_reinterpret, pair_of
from kvplan.cli.arguments.values import whole
from kvplan.cli.screen.documents import check_file, print_json, write_file
from kvplan.cli.screen.printing import PATIENCE, progress
from kvplan.plan.copy_program import CopyProgram, compile_quietly
from kvplan.program.explain import fitted
from kvplan.program.program import BlockAxis, Run, RunGroup

EXAMPLES = """examples:
  kvplan explain examples/specs/gpu_split_kv.toml \\
      examples/specs/host_block_first.toml
  kvplan explain "layer: kv block token head dim" \\
      "block layer kv token head dim" --dst-sizes block=256,token=64 \\
      --sizes layer=80,block=1024,token=16,head=2,dim=128
  kvplan explain examples/specs/host_block_first.toml \\
      examples/specs/gpu_split_kv.toml \\
      --blocks 0-15 --overlap decode --profile h100
  kvplan explain examples/specs/gpu_split_kv.toml \\
      examples/specs/host_block_first.toml --svg program.svg"""
PROGRAM = ("unit_tokens", "unit_nbytes", "src_units", "dst_units", "runs", "run_nbytes", "alignment")
KNOBS = ("max_programs", "staging_bytes")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.epilog = EXAMPLES
    add_pair(parser)
    add_reinterpret(parser)
    add_blocks(parser)
    for name in KNOBS:
        parser.add_argument(f"--{name.replace('_', '-')}", type=whole, metavar="N", help=f"the policy's {name}")
    parser.add_argument(
        "--by-layer", action="store_true", help="the plan is submitted by_layer: cut into groups of layers"
    )
    parser.add_argument("--svg", metavar="FILE", help="write a picture of the runs of one unit as SVG")
    parser.add_argument("--json", action="store_true", help="one JSON object (schema kvplan.explain)")


def run(args: argparse.Namespace) -> int:
    """Print the program after each pass, and the candidates of a plan if blocks are given."""
    from kvplan.cost.policy import Policy

    if args.svg is not None:
        check_file("--svg", args.svg)
    width = get_terminal_size().columns
    policy = Policy(overlap=args.overlap, **{name: getattr(args, name) for name in KNOBS})
    with progress(silent=args.json, after=PATIENCE) as tell:
        tell(None, "compiling and planning")
        compiled = compile_quietly(*pair_of(args), reinterpret=args.reinterpret)
        plan = plan_of(args, compiled)
        candidates: dict[str, Any] = {}
        text = ""
        if plan is not None:
            candidates, text = candidates_of(plan, args.profile, policy, width, by_layer=args.by_layer)
        explained = "" if args.json else compiled.explain(width)
        if args.svg is not None:
            write_file("--svg", args.svg, compiled.diagram().encode())
    if args.json:
        print_json("explain", _facts(compiled) | ({"plan": candidates} if candidates else {}))
        return 0
    print(explained.rstrip("\n"))
    if text:
        print()
    for line in text.splitlines():
        print("\n".join(fitted(line, width, 4)))
    return 0


def _facts(compiled: CopyProgram) -> dict[str, Any]:
    """Return the facts of the program; numbers are bytes unless the name says otherwise."""
    program = compiled.program
    return {
        "src": side_facts(compiled.src),
        "dst": side_facts(compiled.dst),
        "direction": compiled.direction,
        **picked(program, PROGRAM),
        "extents": {side: extent_facts(program, side) for side in SIDES},
        "groups": [_group(group) for group in program.groups],
        "unwritten": unwritten_facts(compiled.unwritten),
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
