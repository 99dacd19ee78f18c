"""``kvplan advise``: find the best order of a host pool for a layout."""

from __future__ import annotations

import argparse

from kvplan.advise.host_order import TOKENS, Wanted, host_orders, pricing_for
from kvplan.cli.answers.advice_facts import Question, advice_facts, advice_rows_of, paste_lines
from kvplan.cli.arguments.sources import add_costs, add_pair, pair_of, source_of
from kvplan.cli.arguments.values import positive
from kvplan.cli.screen.documents import print_json
from kvplan.cli.screen.printing import PATIENCE, fact_table, progress, show
from kvplan.cost.policy import Policy
from kvplan.cost.store import profile_of

EXAMPLES = """examples:
  kvplan advise examples/specs/x_packed.toml --block-tokens 64
  kvplan advise examples/specs/gpu_split_kv.toml \\
      examples/specs/host_token_major.toml --direction load
  kvplan advise "layer: kv block token head dim" \\
      --sizes layer=80,block=1024,token=16,head=2,dim=128

With HOST, the pool's present layout, only orders that take less time are shown."""

DIRECTIONS = {"both": ("store", "load"), "store": ("store",), "load": ("load",)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.epilog = EXAMPLES
    add_pair(parser, ("LAYOUT", "HOST"), both=False, devices=("cuda:0", "cpu"))
    parser.add_argument("--block-tokens", type=positive, metavar="N",
                        help="token slots per block of the pool (default: as HOST, else as LAYOUT)")  # fmt: skip
    parser.add_argument("--direction", choices=DIRECTIONS, default="both",
                        help="the transfers whose time counts (default both)")  # fmt: skip
    parser.add_argument("--tokens", type=positive, default=TOKENS, metavar="N",
                        help=f"tokens of one transfer (default {TOKENS:,})")  # fmt: skip
    add_costs(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object (schema kvplan.advise)")


def run(args: argparse.Namespace) -> int:
    """Print the best orders."""
    policy = Policy(overlap=args.overlap)
    profile, where = profile_of(args.profile)
    layout, host = (source_of(args), None) if args.destination is None else pair_of(args)
    device = "cpu" if host is None else host.device
    directions = DIRECTIONS[args.direction]
    pricing = pricing_for(layout, device, profile, directions=directions, tokens=args.tokens, policy=policy)
    with progress(silent=args.json, after=PATIENCE) as tell:
        wanted = Wanted(block_tokens=args.block_tokens)
        found = host_orders(layout, pricing, present=host, wanted=wanted, tell=tell)
    question = Question(layout, host, pricing, found, where)
    if args.json:
        print_json("advise", advice_facts(question))
        return 0
    show(fact_table(advice_rows_of(question)))
    for line in paste_lines(question):
        print(line)
    return 0
