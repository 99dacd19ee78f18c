"""``kvplan verify``: move markers from one layout to another and back."""

from __future__ import annotations

import argparse

from kvplan.cli.answers.marker_facts import verify_facts, verify_rows
from kvplan.cli.arguments.sources import add_pair, add_reinterpret, pair_of
from kvplan.cli.arguments.values import whole
from kvplan.cli.screen.documents import print_json
from kvplan.cli.screen.printing import PATIENCE, fact_table, progress, show

EXAMPLES = """examples:
  kvplan verify examples/specs/gpu_split_kv.toml \\
      examples/specs/host_block_first.toml
  kvplan verify "kv block token head dim" "block kv head token dim" \\
      --sizes block=64,token=16,head=8,dim=128 --blocks 4

Both layouts are reserved in CPU memory, with the strides of their specs.
The blocks are drawn at random: 8, or fewer where 8 hold more than 4 MiB; with
--blocks up to 64 MiB. Exit code 1: a byte did not arrive, or a byte outside the
plan was written."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.epilog = EXAMPLES
    add_pair(parser)
    add_reinterpret(parser)
    parser.add_argument("--blocks", type=whole, metavar="N",
                        help="number of the larger blocks (default 8, or fewer: those that 4 MiB hold)")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="one JSON object (schema kvplan.verify)")


def run(args: argparse.Namespace) -> int:
    """Move markers to the other layout and back, and print whether all of them arrived."""
    with progress(silent=args.json, after=PATIENCE) as tell:
        tell(None, "moving markers there and back")
        facts = verify_facts(*pair_of(args), args.blocks, reinterpret=args.reinterpret)
    if args.json:
        print_json("verify", facts)
    else:
        show(fact_table(verify_rows(facts)))
    return 0 if facts["ok"] else 1
