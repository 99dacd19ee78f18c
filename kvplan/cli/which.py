"""``kvplan which``: what lies at an address of a layout."""

from __future__ import annotations

import argparse
import re
from itertools import groupby
from typing import Any

from kvplan.base.numbers import count_of, nbytes_text
from kvplan.base.quoting import quoted
from kvplan.cli.arguments.sources import add_layout, layout_of
from kvplan.cli.screen.documents import print_json
from kvplan.cli.screen.printing import fact_table, show
from kvplan.layout.components import ADDRESSES, INT64_MAX
from kvplan.layout.inverse import Row
from kvplan.layout.kvlayout import KVLayout
from kvplan.layout.places import Place, locate

EXAMPLES = """examples:
  kvplan which 16@0x7f0000002000 examples/specs/gpu_split_kv.toml
  kvplan which 0x7e0000000123 "block token dim" \\
      --sizes block=64,token=16,dim=576
  kvplan which 4096@0x7f3c00100000 dump.json    # of layout.save("dump.json")"""

SHOWN_LINES = 16
_WHAT = re.compile(r"(?:(0x[0-9a-f]{1,16}|[0-9]{1,19})@)?(0x[0-9a-f]{1,16}|[0-9]{1,19})", re.IGNORECASE)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.epilog = EXAMPLES
    parser.add_argument("what", type=what, metavar="WHAT", help="BYTES@ADDRESS, or an ADDRESS: decimal, or hex as 0x7f")
    add_layout(parser)
    parser.add_argument("--overlay", action="append", default=[], metavar="SPEC",
                        help="another file whose layout lies over the same memory (again for each)")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="one JSON object (schema kvplan.which)")


def run(args: argparse.Namespace) -> int:
    """Print what lies there."""
    nbytes, address = args.what
    overlaid = [argparse.Namespace(layout=path, sizes=None, dtype=None, device=None) for path in args.overlay]
    layouts = [layout_of(one) for one in (args, *overlaid)]
    found = [(layout, locate(layout, address, nbytes)) for layout in layouts]
    content = any(all(place.kind == "content" for place in places) for _, places in found)
    if args.json:
        held = [{"notation": layout.notation, "addresses": layout.addresses, "places": list(map(_place, places))}
                for layout, places in found]  # fmt: skip
        print_json("which", {"address": address, "nbytes": nbytes, "content": content, "layouts": held})
        return 0 if content else 1
    show(*(fact_table(place_rows(layout, places, address, nbytes)) for layout, places in found))
    return 0 if content else 1


def place_rows(layout: KVLayout, places: tuple[Place, ...], address: int, nbytes: int) -> list[tuple[str, str]]:
    """What lies at an address, a row a fact."""
    first = places[0]
    rows = [
        ("layout", f"{layout.notation}{ADDRESSES[layout.addresses]}"),
        ("asked", f"{nbytes_text(nbytes)} at {address:#x}"),
    ]
    if first.kind != "outside":
        of = f"{first.region} of {count_of(len(layout.regions), 'region')}"
        rows.append(("region", f"{of}, {first.offset:,} bytes into its {first.region_nbytes:,}"))
    lines = _lines(places)
    rows += lines[:SHOWN_LINES]
    if len(lines) > SHOWN_LINES:
        rows.append(("", f"and {count_of(len(lines) - SHOWN_LINES, 'more line')}; --json has all of it"))
    return rows


def _lines(places: tuple[Place, ...]) -> list[tuple[str, str]]:
    """A line a place; layers that follow one another and hold the same are one."""
    lines = []
    for _, alike in groupby(enumerate(places), key=lambda numbered: _alike(*numbered)):
        held = [place for _, place in alike]
        first, last = held[0], held[-1]
        words = str(first)
        if first.component is not None and last.component is not None and len(held) > 1:
            many = f"layers {first.component.layer}-{last.component.layer}"
            words = words.replace(f"layer {first.component.layer}", many, 1) + ", of each"
        lines.append((f"{first.address:#x}", words))
    return lines


def _alike(number: int, place: Place) -> tuple[object, ...]:
    """Equal for neighbours that differ in nothing but the layer, which ascends with their number."""
    if place.component is None:
        return (number,)
    held = (place.blocks, place.tokens, place.subblocks, place.heads, place.bytes)
    return (place.component.layer - number, place.component.part, place.component.form, *held)


def _place(place: Place) -> dict[str, Any]:
    component = place.component
    return {
        "kind": place.kind,
        "address": place.address,
        "nbytes": place.nbytes,
        "region": place.region,
        "offset": place.offset,
        "layer": None if component is None else component.layer,
        "part": None if component is None else component.part,
        "blocks": list(place.blocks),
        "tokens": list(place.tokens),
        **({"subblocks": list(place.subblocks)} if place.subblocks else {}),
        "heads": list(place.heads),
        "bytes": [list(span) for span in place.bytes],
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


def what(text: str) -> tuple[int, int]:
    """Bytes and address.

    >>> what("16@0x7f00"), what("4096")
    ((16, 32512), (1, 4096))
    """
    match = _WHAT.fullmatch(text)
    nbytes, address = (
        (int(number, 16 if number[:2].lower() == "0x" else 10) for number in (match[1] or "1", match[2]))
        if match
        else (0, 0)
    )
    if nbytes < 1 or address + nbytes > INT64_MAX:
        raise argparse.ArgumentTypeError(f"{quoted(text)} is no BYTES@ADDRESS, as in 16@0x7f0000002000")
    return nbytes, address
