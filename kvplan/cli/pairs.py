"""``kvplan pairs``: print how every device layout of the catalogue moves to every host layout of the same cache."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from kvplan.cli.answers.pair_facts import alike, by_pool, mixed_kinds, pairs_facts, pool_name, title
from kvplan.cli.screen.documents import print_json
from kvplan.cli.screen.printing import PATIENCE, fact_table, number_table, progress, show

EXAMPLES = """examples:
  kvplan pairs --device vllm-LBHNC --host page-first
  kvplan pairs --markdown > pairs.md"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.epilog = EXAMPLES
    parser.add_argument("--device", metavar="NAME", help="this device layout only")
    parser.add_argument("--host", metavar="NAME", help="this host layout only")
    shape = parser.add_mutually_exclusive_group()
    shape.add_argument("--json", action="store_true", help="one JSON object (schema kvplan.pairs)")
    shape.add_argument("--markdown", action="store_true", help="a page of tables in Markdown")


def run(args: argparse.Namespace) -> int:
    """Print the pairs. Return 1 if a pair of one kind is refused."""
    with progress(silent=args.json, after=PATIENCE) as tell:
        tell(None, "compiling every pair")
        facts = pairs_facts(args.device, args.host)
    if args.json:
        print_json("pairs", facts)
    elif args.markdown:
        from kvplan.cli.answers.pairs_page import page

        print(page(facts, mixed_kinds()), end="")
    else:
        _show(facts)
    return int(any(pair["refused"] for pair in facts["pairs"]))


def _show(facts: Mapping[str, Any]) -> None:
    models = {model["name"]: model for model in facts["models"]}
    notations = {layout["name"]: layout["notation"] for layout in facts["layouts"]}
    header = ("runs", "bytes", "extents", "bytes", "align", "device layouts")
    for model in models.values():
        shown = [fact_table([("model", title(model))])]
        for (name, host, tokens, tp), pairs in by_pool(facts["pairs"]).items():
            if name == model["name"]:
                where = [("host", f"{host}, {pool_name(model, tokens, tp)}"), ("", notations[host])]
                shown += [fact_table(where), number_table(header, _rows(pairs), right=range(5))]
        if model is not facts["models"][0]:
            print()
        show(*shown)


def _rows(pairs: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, ...]]:
    for one in alike(pairs):
        yield (*one[:5], ", ".join(one.devices))
