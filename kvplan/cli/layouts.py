"""``kvplan inspect`` and ``which``: the facts of a layout, the place of its bytes, and what lies at an address."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from dataclasses import field, replace
from itertools import groupby
from typing import Any

from kvplan.base.numbers import count_of, nbytes_text
from kvplan.cli.answer import Answer, Part, Table
from kvplan.cli.arguments import SOURCE, add_layout, read_layout, span
from kvplan.cli.catalogue import OPTIONS, add_model, run_model
from kvplan.cli.screen import Tell, add_pictures, pictures
from kvplan.draw.notebook import layers_text, layout_facts
from kvplan.errors import KVPlanError
from kvplan.layout.address_ranges import Padding, padding_of
from kvplan.layout.components import ADDRESSES, Region
from kvplan.layout.kvlayout import KVLayout
from kvplan.layout.places import Place, locate
from kvplan.layout.views import View, token_nbytes, views
from kvplan.plan.copy_program import compile_quietly
from kvplan.program.program import Extents

INSPECT_EXAMPLES = """examples:
  kvplan inspect examples/specs/gpu_split_kv.toml --picture --svg block.svg
  kvplan inspect --model llama-3.1-70b --engine vllm --tp 4 --host page-first
  kvplan inspect --config path/to/config.json --block-tokens 64"""


class PaddingFacts(
    Part, sources=(Padding,), names="share between_nbytes before_nbytes after_nbytes block_nbytes unused_nbytes"
):
    """Bytes that are not content."""


class RegionFacts(Part, sources=(Region,), names="address nbytes pinned writable"):
    """One allocation."""


LAYOUT = "notation sizes dtype device virtual addresses layers heads parts num_blocks block_tokens nbytes block_nbytes"


class LayoutAnswer(Answer, sources=(KVLayout,), names=LAYOUT):
    """The facts of a layout.

    Attributes:
        heads: global numbers of the KV heads.
        token_nbytes: bytes a token of the parts that have token slots; null if none has.
        padding_nbytes: bytes of padding.
        padding: where the padding is.
        block_extents: contiguous byte ranges of a block.
        views: axes, for each form of layers and parts.
        regions: the allocations, by address.
        seams: addresses that no descriptor may cross.
    """

    schema = "inspect/1"
    heads: tuple[int, ...]
    token_nbytes: int | None
    padding_nbytes: int
    padding: PaddingFacts
    block_extents: Extents
    views: tuple[View, ...]
    regions: tuple[RegionFacts, ...]
    seams: tuple[int, ...]
    words: dict[str, str] = field(kw_only=True)
    picture: Any = field(default=None, kw_only=True)

    @classmethod
    def read(cls, layout: KVLayout) -> LayoutAnswer:
        """Return the facts of a layout."""
        padding = padding_of(layout.built)
        return cls.of(
            layout,
            heads=tuple(layout.heads),
            token_nbytes=token_nbytes(layout),
            padding_nbytes=padding.nbytes,
            padding=PaddingFacts.of(padding),
            block_extents=compile_quietly(layout, layout).program.extents("src"),
            views=views(layout),
            regions=tuple(RegionFacts.of(region) for region in sorted(layout.regions, key=lambda one: one.address)),
            words=layout_facts(layout),
        )

    def blocks(self) -> Iterable[Any]:
        """Return the facts, the axes of each view, and the picture."""
        facts = Table([*self.words.items()])
        return [facts, *map(self._axes, self.views), *([] if self.picture is None else [self.picture])]

    def _axes(self, view: View) -> Table:
        """Return a row for each axis. A split axis shows its factors side by side, the outer one first."""
        layers = "" if view.layers == self.layers else f", {layers_text(view.layers)}"
        rows = []
        for axis in view.axes:
            if axis.factors or axis.axis not in ("layer", "part"):
                extents = " x ".join(f"{factor.extent:,}" for factor in axis.factors) or "1"
                strides = ("separate" if factor.stride is None else f"{factor.stride:,}" for factor in axis.factors)
                name = "dim (bytes)" if axis.axis == "dim" else axis.axis
                rows.append((name, extents, ", ".join(strides) or "-"))
        return Table(rows, (f"{', '.join(view.parts)}{layers}", "extent", "stride in bytes"), (1, 2))


FILE = "notation sizes dtype num_blocks block_tokens virtual parts"


class LayoutFile(Answer, sources=(KVLayout,), names=FILE):
    """A dump of a layout: addresses and strides, no data. Written by KVLayout.save, read by KVLayout.from_spec.

    Attributes:
        regions: allocations: address, nbytes, device, and what is not usual.
        components: one for each layer and part: factors of the axes with their strides, and where it is.
        itemsize: bytes of an element; null if elements differ.
    """

    schema = "layout/1"
    regions: tuple[dict[str, Any], ...]
    components: tuple[dict[str, Any], ...]
    itemsize: int | None = None


def add_inspect(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.epilog = INSPECT_EXAMPLES
    source = parser.add_mutually_exclusive_group()
    source.add_argument("layout", metavar="SPEC", nargs="?", help=SOURCE)
    source.add_argument("--model", nargs="?", const="", metavar="NAME", help="of the catalogue; without NAME, list all")
    source.add_argument("--config", metavar="FILE", help="a config.json of Hugging Face")
    add_layout(parser.add_argument_group("of a SPEC"))
    add_model(parser.add_argument_group("of a model"))
    add_pictures(parser.add_argument_group("pictures"))


def run_inspect(args: argparse.Namespace, tell: Tell) -> Answer:
    """Return the facts of a layout, or of a model's cache."""
    if args.layout is args.model is args.config is None:
        raise KVPlanError(
            "the following arguments are required: SPEC, --model or --config; see 'kvplan inspect --help'"
        )
    of_model = args.layout is None
    for option in ("sizes", "device") if of_model else OPTIONS:
        if getattr(args, option) is not None:
            name, other = option.replace("_", "-"), "a SPEC, not with --model" if of_model else "--model or --config"
            raise KVPlanError(f"unrecognized arguments: --{name} goes with {other}")
    if of_model:
        return run_model(args)
    layout = read_layout(args.layout, args.sizes, args.dtype, args.device)
    return replace(LayoutAnswer.read(layout), picture=pictures(args, layout))


WHICH_EXAMPLES = """examples:
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


def add_which(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.epilog = WHICH_EXAMPLES
    parser.add_argument("what", type=span, metavar="WHAT", help="BYTES@ADDRESS, or an ADDRESS: decimal, or hex as 0x7f")
    parser.add_argument("layout", metavar="SPEC", help=SOURCE)
    add_layout(parser)
    parser.add_argument("--overlay", action="append", default=[], metavar="SPEC",
                        help="another file whose layout covers the same memory (may be repeated)")  # fmt: skip


def run_which(args: argparse.Namespace, tell: Tell) -> WhichAnswer:
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
