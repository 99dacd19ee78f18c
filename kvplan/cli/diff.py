"""``kvplan diff``: compare two layouts, find where their common runs end, and suggest a better order."""

from __future__ import annotations

import argparse
from typing import Any

from kvplan.advise.advise import Advice, Numbers
from kvplan.advise.compare import Break, untouched
from kvplan.cli.answers.diff_rows import FACT_HEADER, advice_rows, fact_rows, told_rows
from kvplan.cli.answers.difference import NAMES, Difference, difference_of, differing
from kvplan.cli.answers.layout_facts import UNIT, extent_facts, picked
from kvplan.cli.arguments.sources import add_advice, add_pair, add_reinterpret, pair_of
from kvplan.cli.screen.documents import print_json
from kvplan.cli.screen.printing import PATIENCE, fact_table, number_table, progress, show
from kvplan.plan.plan import direction_of
from kvplan.program.passes import Passes
from kvplan.program.program import Program

EXAMPLES = """examples:
  kvplan diff examples/specs/gpu_split_kv.toml \\
      examples/specs/host_token_major.toml
  kvplan diff examples/specs/gpu_split_kv.toml \\
      examples/specs/host_block_first.toml --change A
  kvplan diff "block token head dim" "block head token dim" \\
      --sizes block=64,token=16,head=8,dim=128

A is the source, B the destination. Exit code 1: they cannot be compiled."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.epilog = EXAMPLES
    add_pair(parser, ("A", "B"))
    add_reinterpret(parser)
    parser.add_argument("--change", choices=("A", "B"),
                        help="the side that may change its order (default: the one on the host, else B)")  # fmt: skip
    add_advice(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object (schema kvplan.diff)")


def run(args: argparse.Namespace) -> int:
    """Print the difference. Return 1 if the pair cannot be compiled."""
    src, dst = pair_of(args)
    with progress(silent=args.json, after=PATIENCE) as tell:
        found = difference_of(src, dst, args.change, reinterpret=args.reinterpret, advice=args.advice, tell=tell)
    if args.json:
        print_json("diff", _facts(found))
    else:
        facts = number_table(FACT_HEADER, fact_rows(found), right=())
        show(facts, fact_table([*told_rows(found), *advice_rows(found)]))
    return int(found.made is None)


def _facts(found: Difference) -> dict[str, Any]:
    """Return the facts of the difference; numbers are bytes unless the name says otherwise."""
    made = found.made
    return {
        "a": found.sides["src"],
        "b": found.sides["dst"],
        "differs": differing(found.sides),
        "direction": direction_of(found.src, found.dst),
        "refused": found.refused,
        "matched": None if made is None else _matched(made),
        "program": None if made is None else _program(made.program),
        "first_break": None if found.broken is None else _broken(found.broken),
        "parts": [{"parts": list(one.parts), "opaque": one.opaque, **_program(one.program)} for one in found.parts],
        "advice": None
        if found.advice is None
        else {
            **_advice(found.advice),
            "other_side": None if found.other is None else _advice(found.other),
        },
    }


def _matched(made: Passes) -> dict[str, Any]:
    stay = list(untouched(made))
    return {
        "pairs": len(made.pairs),
        "layers": sorted({pair.layer for pair in made.pairs}),
        "parts": list(dict.fromkeys(pair.part for pair in made.pairs)),
        "heads": sorted({head for pair in made.pairs for head in pair.heads}),
        "a_keeps": [text for side, text in stay if side == "src"],
        "b_keeps": [text for side, text in stay if side == "dst"],
    }


def _program(program: Program) -> dict[str, Any]:
    return {
        **picked(program, ("unit_tokens", "unit_nbytes")),
        "a_units": program.src_units,
        "b_units": program.dst_units,
        **picked(program, ("runs", "run_nbytes", "alignment")),
        "extents": {"a": extent_facts(program, "src"), "b": extent_facts(program, "dst")},
    }


def _broken(broken: Break) -> dict[str, Any]:
    return {
        "nbytes": broken.nbytes,
        "start": broken.start._asdict(),
        "holds": broken.holds,
        "a": broken.src._asdict(),
        "b": broken.dst._asdict(),
        "axis": broken.axis,
    }


def _advice(advice: Advice) -> dict[str, Any]:
    return {
        "change": NAMES[advice.change],
        "tried": advice.tried,
        "present": None if advice.present is None else _numbers(advice.present),
        "orders": [
            {"notation": order.notation, "block_tokens": order.block_tokens, **_numbers(order.numbers),
             "spec": order.spec}
            for order in advice.orders
        ],
    }  # fmt: skip


def _numbers(numbers: Numbers) -> dict[str, Any]:
    extents = dict(zip(("count", "min_nbytes", "max_nbytes"), numbers.extents, strict=True))
    return {**picked(numbers, UNIT), "extents": extents}
