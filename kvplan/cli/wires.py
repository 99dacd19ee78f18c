"""``kvplan wires``: print what requests take between machines, with a descriptor for each piece and packed."""

from __future__ import annotations

import argparse
from typing import Any

from kvplan.base.numbers import duration
from kvplan.cli.answers.wire_facts import tables, wires_facts
from kvplan.cli.arguments.values import context_lengths
from kvplan.cli.screen.documents import print_json
from kvplan.cli.screen.printing import fact_table, number_table, show

EXAMPLES = """examples:
  kvplan wires --model deepseek-v3
  kvplan wires --model llama-3.1-70b --engine sglang --tokens 8k
  kvplan wires --model qwen3-30b-a3b --wire push --json"""
HEADER = ("ranks", "tokens", "descriptors", "each", "direct", "packed", "writes")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.epilog = EXAMPLES
    parser.add_argument("--model", metavar="NAME", help="this model of the catalogue only")
    parser.add_argument("--engine", metavar="NAME", help="the layouts of this engine only: vllm or sglang")
    parser.add_argument("--tokens", type=context_lengths, metavar="N,N", help="lengths of requests (default 32k,128k)")
    parser.add_argument(
        "--wire", metavar="PROFILE", help="this wire only: a published one, default, host, or a file (default: all)"
    )
    shape = parser.add_mutually_exclusive_group()
    shape.add_argument("--json", action="store_true", help="one JSON object (schema kvplan.wires)")
    shape.add_argument("--markdown", action="store_true", help="the page docs/processes/wires.md")


def run(args: argparse.Namespace) -> int:
    """Print the transfers."""
    from kvplan.catalogue.models import find_model, models
    from kvplan.cost.wires.scale import ENGINES, TOKENS, engine_of
    from kvplan.cost.wires.wire_store import PUBLISHED, published, wire_by_name

    wires = [wire_by_name(args.wire)] if args.wire else [published(name) for name in PUBLISHED]
    chosen = [find_model(args.model)] if args.model else list(models().values())
    engines = [engine_of(args.engine)] if args.engine else list(ENGINES)
    facts = wires_facts(chosen, engines, args.tokens or TOKENS, wires)
    if args.json:
        print_json("wires", facts)
    elif args.markdown:
        from kvplan.cli.answers.wires_page import page

        print(page(facts), end="")
    else:
        _show(facts)
    return 0


def _show(facts: dict[str, Any]) -> None:
    wires = [(wire["wire"] or "any wire", f"{duration(wire['descriptor'])} a descriptor: {wire['made']}")
             for wire in facts["wires"]]  # fmt: skip
    show(fact_table(wires))
    for model, engine, rows in tables(facts):
        print()
        cells = [(one.ranks, one.tokens, f"{one.descriptors:,}", f"{one.each:,}", one.direct,
                  one.packed, f"{one.messages:,}") for one in rows]  # fmt: skip
        names = f"{model}, layouts of {'every engine' if engine == 'any' else engine}"
        show(fact_table([("model", names)]), number_table(HEADER, cells, right=range(1, 7)))
