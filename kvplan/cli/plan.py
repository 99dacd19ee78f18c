"""``kvplan plan``: the copies that move some blocks from one layout to another."""

from __future__ import annotations

import argparse
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, groupby
from typing import Any

from kvplan.base.numbers import count_of, exact
from kvplan.base.quoting import quoted
from kvplan.cli.answers.layout_facts import side_facts
from kvplan.cli.arguments.sources import add_pair, pair_of
from kvplan.cli.screen.documents import print_json
from kvplan.cli.screen.printing import fact_table, number_table, show
from kvplan.errors import BlockIndexError
from kvplan.layout.components import ADDRESSES
from kvplan.layout.kvlayout import KVLayout

EXAMPLES = """examples:
  kvplan plan examples/specs/gpu_split_kv.toml \\
      examples/specs/host_block_first.toml --src 0,1,2 --dst 3-5
  kvplan plan examples/specs/gpu_split_kv.toml \\
      examples/specs/host_block_first_64.toml \\
      --src 0-10 --dst 0,1,3 --dst-skip 1 --limit all --json"""

SHOWN_SIZES = 8
_IDS = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.epilog = EXAMPLES
    add_pair(parser)
    for side in ("src", "dst"):
        where = {"src": "read", "dst": "written"}[side]
        parser.add_argument(f"--{side}", type=block_ids, required=True, metavar="IDS",
                            help=f"blocks {where}, in order of tokens: 0,1,4-7")  # fmt: skip
    for side in ("src", "dst"):
        parser.add_argument(f"--{side}-skip", type=count, default=0, metavar="UNITS",
                            help=f"units, not tokens, skipped in front in the first {side.upper()} block")  # fmt: skip
    parser.add_argument("--max-bytes", type=count, metavar="N", help="bytes that no descriptor may exceed")
    parser.add_argument(
        "--limit", type=limit, default=10, metavar="ROWS", help="descriptors shown (default 10), or all"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object (schema kvplan.plan)")


def run(args: argparse.Namespace) -> int:
    """Print the plan."""
    facts = plan_facts(args, *pair_of(args))
    if args.json:
        print_json("plan", facts)
        return 0
    tables = [fact_table(_summary(facts))]
    if facts["rows"]:
        header = ("", "source", "in region", "destination", "in region", "bytes")
        tables.append(number_table(header, map(_row, range(len(facts["rows"])), facts["rows"]), right=(0, 5)))
    show(*tables)
    return 0


def plan_facts(args: argparse.Namespace, src: KVLayout, dst: KVLayout) -> dict[str, Any]:
    """The plan as plain facts; descriptors in order of destination."""
    import numpy as np

    from kvplan.plan.copy_program import compile  # noqa: A004

    program = compile(src, dst)
    plan = program.plan(
        expanded("--src", args.src, src), expanded("--dst", args.dst, dst), args.src_skip, args.dst_skip
    )
    made = plan.descriptors(args.max_bytes)
    order = np.argsort(made.dst)
    sizes = sorted(made.size.tolist(), reverse=True)
    shown = order[: args.limit]
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
        "descriptors": len(sizes),
        "strided_rows": len(plan.strided()),
        "sizes": [{"count": len(list(alike)), "nbytes": size} for size, alike in groupby(sizes)],
        "rows": list(_descriptor_facts(triples, src, dst)),
    }


def _descriptor_facts(
    triples: Iterable[tuple[int, int, int]], src: KVLayout, dst: KVLayout
) -> Iterator[dict[str, int]]:
    starts = [sorted(region.address for region in side.regions) for side in (src, dst)]
    for source, destination, size in triples:
        row = {"src": source, "dst": destination, "nbytes": size}
        for side, address, known in (("src", source, starts[0]), ("dst", destination, starts[1])):
            region = bisect_right(known, address) - 1
            row |= {f"{side}_region": region, f"{side}_offset": address - known[region]}
        yield row


def _summary(facts: dict[str, Any]) -> list[tuple[str, str]]:
    src, dst = facts["src"], facts["dst"]
    whole = f"{count_of(facts['units'], 'unit')} of {facts['unit']}"
    rows = [
        ("from", f"{src['notation']} on {src['device']}{ADDRESSES[src['addresses']]}"),
        ("to", f"{dst['notation']} on {dst['device']}{ADDRESSES[dst['addresses']]}"),
        (facts["direction"], f"{whole}, {exact(facts['nbytes'])}"),
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
    sides = ((f"{row[side]:#x}", f"{row[f'{side}_region']}+{row[f'{side}_offset']:#x}") for side in ("src", "dst"))
    return (str(number), *chain(*sides), f"{row['nbytes']:,}")


def run_lengths(runs: Sequence[tuple[int, int]]) -> str:
    """Sizes as (count, size), run-length; those that stand alone share a bracket.

    >>> run_lengths([(3, 8192), (1, 4096), (1, 512), (2, 256)])
    '3*[8192] | [4096, 512] | 2*[256]'
    """
    pieces: list[str] = []
    for alone, group in groupby(runs[:SHOWN_SIZES], key=lambda run: run[0] == 1):
        if alone:
            pieces.append(f"[{', '.join(str(size) for _, size in group)}]")
        else:
            pieces.extend(f"{times}*[{size}]" for times, size in group)
    if len(runs) > SHOWN_SIZES:
        pieces.append(f"and {len(runs) - SHOWN_SIZES:,} smaller sizes")
    return " | ".join(pieces) or "none"


def expanded(option: str, ids: Sequence[range], layout: KVLayout) -> list[int]:
    """All ids. Ends are checked first, so that a mistyped range costs no memory."""
    for some in ids:
        if some.stop > layout.num_blocks:
            raise BlockIndexError(
                f"{option} names block {some.stop - 1}; blocks there are 0 to {layout.num_blocks - 1}"
            )
    return list(chain(*ids))


def block_ids(text: str) -> tuple[range, ...]:
    """Block ids as ranges.

    >>> block_ids("0,1,4-7")
    (range(0, 1), range(1, 2), range(4, 8))
    """
    found = []
    for item in text.split(","):
        match = _IDS.fullmatch(item.strip())
        first, last = (int(end) for end in (match[1], match[2] or match[1])) if match else (1, 0)
        if last < first:
            raise argparse.ArgumentTypeError(f"{quoted(item)} in {quoted(text)} is no block id or range, as in 0,1,4-7")
        found.append(range(first, last + 1))
    return tuple(found)


def count(text: str) -> int:
    """A number of at least 0."""
    if re.fullmatch(r"[0-9]{1,18}", text) is None:
        raise argparse.ArgumentTypeError(f"{quoted(text)} is no number of at least 0")
    return int(text)


def limit(text: str) -> int | None:
    """Rows to show; None for all."""
    return None if text == "all" else count(text)
