"""``kvplan which``: print what lies at an address of a layout."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from dataclasses import field
from itertools import groupby
from typing import Any

from kvplan.base.numbers import count_of, nbytes_text
from kvplan.cli.answer import Answer, Part, Table
from kvplan.cli.arguments import SOURCE, add_layout, read_layout, span
from kvplan.cli.screen import Tell
from kvplan.layout.components import ADDRESSES
from kvplan.layout.kvlayout import KVLayout
from kvplan.layout.places import Place, locate

EXAMPLES = """examples:
  kvplan which 16@0x7f0000002000 examples/specs/gpu_split_kv.toml
  kvplan which 4096@0x7f3c00100000 dump.json    # of layout.save("dump.json")"""
SHOWN_LINES = 16


PLACE = ("kind address nbytes region offset layer part blocks tokens heads bytes after after_nbytes before "
         "before_nbytes gaps")  # fmt: skip


class PlaceFacts(Part, sources=(Place,), names=PLACE):
    """Some bytes: their coordinates, or their position in the padding.

    Attributes:
        layer: global number; null for padding.
        part: its name; null for padding.
        words: the same in words.
        subblocks: opaque sub-blocks; absent where there are none.
    """

    layer: int | None
    part: str | None
    words: str
    subblocks: tuple[int, ...] = ()


class Placed(Part, sources=(KVLayout,), names="notation addresses"):
    """What one layout holds there.

    Attributes:
        places: in order of address.
    """

    places: tuple[PlaceFacts, ...]


class WhichAnswer(Answer):
    """The content at an address.

    Attributes:
        address: asked for.
        nbytes: bytes asked for.
        content: whether all of them are content in one of the layouts.
        layouts: what each layout holds there.
    """

    schema = "which/1"
    address: int
    nbytes: int
    content: bool
    layouts: tuple[Placed, ...]
    tables: tuple[Table, ...] = field(kw_only=True)

    def blocks(self) -> Iterable[Any]:
        """Return a table for each layout."""
        return self.tables


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.epilog = EXAMPLES
    parser.add_argument("what", type=span, metavar="WHAT", help="BYTES@ADDRESS, or an ADDRESS: decimal, or hex as 0x7f")
    parser.add_argument("layout", metavar="SPEC", help=SOURCE)
    add_layout(parser)
    parser.add_argument("--overlay", action="append", default=[], metavar="SPEC",
                        help="another file whose layout covers the same memory (may be repeated)")  # fmt: skip


def run(args: argparse.Namespace, tell: Tell) -> WhichAnswer:
    """Return the places; a finding if no layout has content at every byte."""
    nbytes, address = args.what
    return which(
        [read_layout(args.layout, args.sizes, args.dtype, args.device), *map(read_layout, args.overlay)],
        address,
        nbytes,
    )


def which(layouts: Iterable[KVLayout], address: int, nbytes: int) -> WhichAnswer:
    """Return what layouts hold at an address."""
    held = [(layout, locate(layout, address, nbytes)) for layout in layouts]
    content = any(all(place.kind == "content" for place in places) for _, places in held)
    placed = tuple(Placed.of(layout, places=tuple(map(_place, places))) for layout, places in held)
    tables = tuple(Table([*_where(layout, places[0], address, nbytes), *_lines(places)]) for layout, places in held)
    return WhichAnswer(address, nbytes, content, placed, tables=tables, status=int(not content))


def _place(place: Place) -> PlaceFacts:
    component = place.component
    layer, part = (None, None) if component is None else (component.layer, component.part)
    return PlaceFacts.of(place, layer=layer, part=part, words=str(place))


def _where(layout: KVLayout, first: Place, address: int, nbytes: int) -> Iterator[tuple[str, str]]:
    yield "layout", f"{layout.notation}{ADDRESSES[layout.addresses]}"
    yield "asked", f"{nbytes_text(nbytes)} at {address:#x}"
    if first.kind != "outside":
        regions = count_of(len(layout.regions), "region")
        yield "region", f"{first.region} of {regions}, {first.offset:,} bytes into its {first.region_nbytes:,}"


def _lines(places: tuple[Place, ...]) -> list[tuple[str, str]]:
    """Return a line for each place. Consecutive layers with the same content share a line."""
    lines = []
    for _, some in groupby(enumerate(places), key=lambda numbered: _alike(*numbered)):
        alike = [place for _, place in some]
        first, last, words = alike[0].component, alike[-1].component, str(alike[0])
        if first is not None and last is not None and len(alike) > 1:
            words = words.replace(f"layer {first.layer}", f"layers {first.layer}-{last.layer}", 1) + ", of each"
        lines.append((f"{alike[0].address:#x}", words))
    more = len(lines) - SHOWN_LINES
    return [
        *lines[:SHOWN_LINES],
        *([("", f"and {count_of(more, 'more line')}; --json has all of it")] if more > 0 else []),
    ]


def _alike(number: int, place: Place) -> tuple[object, ...]:
    """Return a key that is equal for places that differ only in the layer, if the layer ascends with their number."""
    if place.component is None:
        return (number,)
    held = (place.blocks, place.tokens, place.subblocks, place.heads, place.bytes)
    return (place.component.layer - number, place.component.part, place.component.form, *held)
