"""``kvplan which``: print what lies at an address of a layout."""

from __future__ import annotations

import argparse
from typing import Any

from kvplan.cli.answers.layout_facts import picked
from kvplan.cli.answers.place_rows import place_rows
from kvplan.cli.arguments.sources import add_layout, file_layout, layout_of
from kvplan.cli.arguments.values import span
from kvplan.cli.screen.documents import print_json
from kvplan.cli.screen.printing import fact_table, show
from kvplan.layout.inverse import Row
from kvplan.layout.places import Place, locate

EXAMPLES = """examples:
  kvplan which 16@0x7f0000002000 examples/specs/gpu_split_kv.toml
  kvplan which 0x7e0000000123 "block token dim" \\
      --sizes block=64,token=16,dim=576
  kvplan which 4096@0x7f3c00100000 dump.json    # of layout.save("dump.json")"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.epilog = EXAMPLES
    parser.add_argument("what", type=span, metavar="WHAT", help="BYTES@ADDRESS, or an ADDRESS: decimal, or hex as 0x7f")
    add_layout(parser)
    parser.add_argument("--overlay", action="append", default=[], metavar="SPEC",
                        help="another file whose layout covers the same memory (may be repeated)")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="one JSON object (schema kvplan.which)")


def run(args: argparse.Namespace) -> int:
    """Print the places. Return 1 if no layout has content at every byte."""
    nbytes, address = args.what
    layouts = [layout_of(args), *map(file_layout, args.overlay)]
    found = [(layout, locate(layout, address, nbytes)) for layout in layouts]
    content = any(all(place.kind == "content" for place in places) for _, places in found)
    if args.json:
        held = [{"notation": layout.notation, "addresses": layout.addresses, "places": list(map(_place, places))}
                for layout, places in found]  # fmt: skip
        print_json("which", {"address": address, "nbytes": nbytes, "content": content, "layouts": held})
    else:
        show(*(fact_table(place_rows(layout, places, address, nbytes)) for layout, places in found))
    return 0 if content else 1


def _place(place: Place) -> dict[str, Any]:
    component = place.component
    return {
        **picked(place, ("kind", "address", "nbytes", "region", "offset")),
        "layer": None if component is None else component.layer,
        "part": None if component is None else component.part,
        **picked(place, ("blocks", "tokens")),
        **({"subblocks": list(place.subblocks)} if place.subblocks else {}),
        "heads": list(place.heads),
        "bytes": [list(ends) for ends in place.bytes],
        "after": _row(place.after),
        "after_nbytes": place.after_nbytes,
        "before": _row(place.before),
        "before_nbytes": place.before_nbytes,
        "gaps": place.gaps,
        "words": str(place),
    }


def _row(row: Row | None) -> dict[str, Any] | None:
    if row is None:
        return None
    return {name: value for name, value in row._asdict().items() if name != "subblock" or value is not None}
