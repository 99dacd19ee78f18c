"""``kvplan plan``: print the copies that move some blocks from one layout to another."""

from __future__ import annotations

import argparse
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

from kvplan.base.numbers import count_of, exact
from kvplan.cli.answers.layout_facts import side_facts
from kvplan.cli.answers.plan_facts import by_size, listed_ids, run_lengths
from kvplan.cli.arguments.sources import SIDES, add_pair, add_reinterpret, pair_of
from kvplan.cli.arguments.values import block_ids, whole
from kvplan.cli.screen.documents import print_json
from kvplan.cli.screen.printing import PATIENCE, fact_table, number_table, progress, show
from kvplan.layout.components import ADDRESSES
from kvplan.layout.kvlayout import KVLayout

EXAMPLES = """examples:
  kvplan plan examples/specs/gpu_split_kv.toml \\
      examples/specs/host_block_first.toml --src 0,1,2 --dst 3-5
  kvplan plan examples/specs/gpu_split_kv.toml \\
      examples/specs/host_block_first_64.toml \\
      --src 0-10 --dst 0,1,3 --dst-skip 1 --limit all --json"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.epilog = EXAMPLES
    add_pair(parser)
    add_reinterpret(parser)
    for side, done in zip(SIDES, ("read", "written"), strict=True):
        parser.add_argument(f"--{side}", type=block_ids, required=True, metavar="IDS",
                            help=f"blocks {done}, in order of tokens: 0,1,4-7")  # fmt: skip
    for side in SIDES:
        parser.add_argument(f"--{side}-skip", type=whole, default=0, metavar="UNITS",
                            help=f"units, not tokens, to skip in the first {side.upper()} block")  # fmt: skip
    parser.add_argument("--max-bytes", type=whole, metavar="N", help="bytes that no descriptor may exceed")
    parser.add_argument("--limit", type=_limit, default=10, metavar="ROWS",
                        help="descriptors shown (default 10), or all")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="one JSON object (schema kvplan.plan)")


def run(args: argparse.Namespace) -> int:
    """Print the plan."""
    with progress(silent=args.json, after=PATIENCE) as tell:
        tell(None, "planning")
        facts = _facts(args, *pair_of(args))
    if args.json:
        print_json("plan", facts)
        return 0
    tables = [fact_table(_summary(facts))]
    if facts["rows"]:
        header = ("", "source", "in region", "destination", "in region", "bytes")
        tables.append(number_table(header, map(_row, range(len(facts["rows"])), facts["rows"]), right=(0, 5)))
    show(*tables)
    return 0


def _facts(args: argparse.Namespace, src: KVLayout, dst: KVLayout) -> dict[str, Any]:
    """Return the facts of the plan. Its descriptors are in order of destination."""
    import numpy as np

    from kvplan.plan.copy_program import compile_quietly

    program = compile_quietly(src, dst, reinterpret=args.reinterpret)
    ids = listed_ids("--src", args.src, src), listed_ids("--dst", args.dst, dst)
    plan = program.plan(*ids, args.src_skip, args.dst_skip)
    made = plan.descriptors(args.max_bytes)
    shown = np.argsort(made.dst)[: args.limit]
    triples = zip(*(column[shown].tolist() for column in made), strict=True)
    return {
        "src": side_facts(src),
        "dst": side_facts(dst),
        "direction": plan.direction,
        "nbytes": plan.nbytes,
        "units": plan.units,
        "unit_tokens": program.unit_tokens,
        "unit": program.program.unit_words,
        "runs": program.runs * plan.units,
        "descriptors": len(made.size),
        "strided_rows": len(plan.strided()),
        "sizes": [{"count": count, "nbytes": size} for count, size in by_size(made.size.tolist())],
        "rows": list(_descriptor_facts(triples, src, dst)),
    }


def _descriptor_facts(
    triples: Iterable[tuple[int, int, int]], src: KVLayout, dst: KVLayout
) -> Iterator[dict[str, int]]:
    starts = [sorted(region.address for region in side.regions) for side in (src, dst)]
    for source, destination, size in triples:
        row = {"src": source, "dst": destination, "nbytes": size}
        for side, address, known in zip(SIDES, (source, destination), starts, strict=True):
            region = bisect_right(known, address) - 1
            row |= {f"{side}_region": region, f"{side}_offset": address - known[region]}
        yield row


def _summary(facts: dict[str, Any]) -> list[tuple[str, str]]:
    src, dst = facts["src"], facts["dst"]
    whole_units = f"{count_of(facts['units'], 'unit')} of {facts['unit']}"
    rows = [
        ("from", f"{src['notation']} on {src['device']}{ADDRESSES[src['addresses']]}"),
        ("to", f"{dst['notation']} on {dst['device']}{ADDRESSES[dst['addresses']]}"),
        (facts["direction"], f"{whole_units}, {exact(facts['nbytes'])}"),
        ("flat", _flat(facts["descriptors"], facts["runs"])),
        ("sizes", run_lengths([(size["count"], size["nbytes"]) for size in facts["sizes"]])),
        ("strided", count_of(facts["strided_rows"], "row")),
    ]
    if facts["rows"]:
        shown = "all" if len(facts["rows"]) == facts["descriptors"] else f"the first {len(facts['rows']):,}"
        rows.append(("below", f"{shown}, in order of destination"))
    return rows


def _flat(descriptors: int, runs: int) -> str:
    made = count_of(descriptors, "descriptor")
    if descriptors == runs:
        return f"{made}, one a run"
    return f"{made}, {'merged' if descriptors < runs else 'cut'} from {count_of(runs, 'run')}"


def _row(number: int, row: dict[str, int]) -> tuple[str, ...]:
    sides = ((f"{row[side]:#x}", f"{row[f'{side}_region']}+{row[f'{side}_offset']:#x}") for side in SIDES)
    return (str(number), *chain(*sides), f"{row['nbytes']:,}")


def _limit(text: str) -> int | None:
    """Read the number of rows to show; None is for all rows."""
    return None if text == "all" else whole(text)
