"""``kvplan explain``: how two layouts compile into a copy program, pass by pass; and which path would take a plan."""

from __future__ import annotations

import argparse
from itertools import groupby
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Any

from kvplan.base.numbers import count_of, exact
from kvplan.cli.answers.layout_facts import extent_facts, side_facts
from kvplan.cli.arguments.sources import add_pair, pair_of
from kvplan.cli.plan import block_ids, count, expanded, run_lengths
from kvplan.cli.screen.documents import print_json
from kvplan.errors import KVPlanError, TransferError
from kvplan.plan.copy_program import CopyProgram, compile  # noqa: A004
from kvplan.program.explain import fitted
from kvplan.program.program import BlockAxis, Run, RunGroup

if TYPE_CHECKING:
    from kvplan.cost.policy import Policy
    from kvplan.cost.profile import DeviceProfile
    from kvplan.plan.plan import Plan

EXAMPLES = """examples:
  kvplan explain examples/specs/gpu_split_kv.toml \\
      examples/specs/host_block_first.toml
  kvplan explain "layer: kv block token head dim" \\
      "block layer kv token head dim" --dst-sizes block=256,token=64 \\
      --sizes layer=80,block=1024,token=16,head=2,dim=128
  kvplan explain examples/specs/host_block_first.toml \\
      examples/specs/gpu_split_kv.toml \\
      --blocks 0-15 --overlap decode --profile h100"""
KNOBS = ("max_programs", "staging_bytes")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.epilog = EXAMPLES
    add_pair(parser)
    parser.add_argument("--blocks", type=block_ids, metavar="IDS", help="of a plan, on both sides: 0,1,4-7")
    for side in ("src", "dst"):
        parser.add_argument(f"--{side}", type=block_ids, metavar="IDS", help=f"where {side.upper()} has others")
    parser.add_argument("--profile", metavar="NAME", help="whose costs: part of a shipped GPU's name, 'default', or a "
                        "file; by default this GPU's")  # fmt: skip
    parser.add_argument("--overlap", default="idle", metavar="WHAT", help="what runs beside: idle, decode or prefill")
    for name in KNOBS:
        parser.add_argument(f"--{name.replace('_', '-')}", type=count, metavar="N", help=f"the policy's {name}")
    parser.add_argument("--json", action="store_true", help="one JSON object (schema kvplan.explain)")


def run(args: argparse.Namespace) -> int:
    """Print the program after each pass, and the candidates of a plan if blocks are given."""
    from kvplan.cost.policy import Policy

    width = get_terminal_size().columns
    policy = Policy(overlap=args.overlap, **{name: getattr(args, name) for name in KNOBS})
    program = compile(*pair_of(args))
    plan = plan_of(args, program)
    facts = program_facts(program)
    if plan is None:
        if args.profile is not None:
            raise KVPlanError("--profile is of a plan; give --blocks, or --src and --dst")
        if args.json:
            print_json("explain", facts)
        else:
            print(program.explain(width).rstrip("\n"))
        return 0
    profile, where = profile_named(args.profile)
    made, text = candidates_of(plan, profile, policy, width)
    if args.json:
        print_json("explain", {**facts, "plan": made})
        return 0
    print(program.explain(width).rstrip("\n"))
    print()
    for line in f"{plan_line(plan)}\n{where}{text}".splitlines():
        print("\n".join(fitted(line, width, 4)))
    return 0


def plan_of(args: argparse.Namespace, program: CopyProgram) -> Plan | None:
    """The plan of the blocks that were given, or None where none were."""
    src, dst = args.src or args.blocks, args.dst or args.blocks
    if src is None and dst is None:
        return None
    if src is None or dst is None:
        raise KVPlanError(f"blocks of {'SRC' if src is None else 'DST'} are missing; give --blocks, or --src and --dst")
    return program.plan(
        expanded("--src" if args.src else "--blocks", src, program.src),
        expanded("--dst" if args.dst else "--blocks", dst, program.dst),
    )


def profile_named(name: str | None) -> tuple[DeviceProfile, str]:
    """The profile, and a line that says whose it is where nobody asked for it."""
    from kvplan.cost.store import all_shipped, by_name, find_for

    if name is not None:
        return by_name(name), ""
    try:
        from kvplan.cuda.driver import driver

        driver()
        return find_for(0), ""
    except TransferError:
        profile = all_shipped()[0]
        return profile, f"no GPU here: as on an {profile.gpu}\n"


def candidates_of(plan: Plan, profile: DeviceProfile, policy: Policy, width: int = 80) -> tuple[dict[str, Any], str]:
    """The plan's candidates as facts and as text of so many columns; of plans that have none, why."""
    from kvplan.cost import model as cost
    from kvplan.cost.explain import explain, facts
    from kvplan.cost.profile import DIRECTIONS
    from kvplan.cost.statistics import statistics_of
    from kvplan.execute.gpu.mixed import halves_of

    size = plan.descriptors().size
    sizes = sorted(size.tolist(), reverse=True)
    alike = [(len(list(group)), nbytes) for nbytes, group in groupby(sizes)]
    about = {"direction": plan.direction, "nbytes": plan.nbytes, "units": plan.units, "descriptors": len(sizes),
             "sizes": [{"count": times, "nbytes": nbytes} for times, nbytes in alike]}  # fmt: skip
    line = f"{count_of(len(sizes), 'descriptor')}: {run_lengths(alike)}"
    if plan.direction not in DIRECTIONS:
        why = f"a {plan.direction!r} plan: nothing is measured of those, loads and stores have a cost model"
        return {**about, "candidates": [], "verdict": why}, f"{line}\n\n{why}"
    statistics = statistics_of(plan)
    refused, most = {}, policy.staging_bytes
    if most is not None and statistics.granule_nbytes > most:
        refused["staged"] = f"a block takes {statistics.granule_nbytes:,} bytes of the ring, which has {most:,}"
    large, small = halves_of(plan)
    halves = (statistics_of(large), statistics_of(small)) if large and small else None
    given = cost.candidates(statistics, profile, policy, refused, halves), statistics, profile, policy
    return {**about, **facts(*given)}, f"{line}\n\n{explain(*given, width)}"


def plan_line(plan: Plan) -> str:
    """A plan in a line."""
    return f"plan: {plan.direction} of {count_of(plan.units, 'unit')}, {exact(plan.nbytes)}"


def program_facts(compiled: CopyProgram) -> dict[str, Any]:
    """The program as plain facts; bytes unless the name says otherwise."""
    program = compiled.program
    return {
        "src": side_facts(compiled.src),
        "dst": side_facts(compiled.dst),
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
