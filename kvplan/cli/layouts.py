"""``kvplan which``, and what other commands say of a layout: its facts, the place of its bytes, and a picture."""

from __future__ import annotations

import argparse
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import field
from typing import Any

from kvplan.base.numbers import count_of, exact, nbytes_text, number_ranges, percent
from kvplan.cli.arguments import SOURCE, add_layout, check_file, read_layout, span, whole, write_file
from kvplan.cli.screen import Answer, Part, Table, Tell, words
from kvplan.errors import BlockIndexError, KVPlanError
from kvplan.layout import kinds
from kvplan.layout.address_ranges import Padding, padding_of
from kvplan.layout.components import ADDRESSES, Region
from kvplan.layout.kvlayout import KVLayout
from kvplan.layout.places import Place, locate
from kvplan.layout.views import View, token_nbytes, views
from kvplan.plan.copy_program import compile_quietly
from kvplan.program.program import Extents

SHOWN_REGIONS, SHOWN_PLACES = 8, 16


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
    picture: str | None = field(default=None, kw_only=True)

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


def layout_facts(layout: KVLayout) -> dict[str, str]:
    """Return the facts of a layout in words; layers that differ have a line for each kind.

    >>> spec = {"notation": "block token dim", "sizes": {"block": 4, "token": 16, "dim": 64}}
    >>> layout_facts(KVLayout.from_spec(spec))["contiguous"]
    'a block is 1 extent of 2,048 bytes (2 KiB)'
    """
    opaque = [part for part in layout.parts if layout.slice(parts=(part,)).opaque]
    headed = any(component.form.headed for component in layout.components)
    unit = "sub-block" if layout.opaque and layout.block_tokens > 1 else "block"
    token, regions = token_nbytes(layout), Counter(region.nbytes for region in layout.regions)
    without = f", without {', '.join(opaque)}: its blocks move whole" * bool(opaque)
    counts = [f"{count:,} x {exact(nbytes)}" for nbytes, count in regions.most_common(SHOWN_REGIONS)]
    more = len(regions) - SHOWN_REGIONS
    count, low, high = compile_quietly(layout, layout).program.extents("src")
    return {
        "layout": layout.notation,
        "content": f"{layout.dtype} on {layout.device}{ADDRESSES[layout.addresses]}",
        "layers": words("layers", layout.layers),
        **{each: text for each, colon, text in (line.partition(": ") for line in kinds.words(layout.built)) if colon},
        "parts": ", ".join(layout.parts),
        "heads": words("heads", tuple(layout.heads)) if headed else "no axis of heads",
        "blocks": f"{layout.num_blocks:,} of {count_of(layout.block_tokens, 'token' if unit == 'block' else unit)}",
        "a token": f"none: {unit}s move whole" if token is None else exact(token) + without,
        "a block": exact(layout.block_nbytes),
        "all blocks": exact(layout.nbytes),
        "padding": _padding(padding_of(layout.built)),
        "contiguous": f"a block is {count_of(count, 'extent')} of "
        f"{exact(high) if low == high else f'{low:,} to {exact(high)}'}",
        "regions": "\n".join([*counts, *([f"and {more:,} other sizes"] if more > 0 else [])]),
        "seams": f"{len(layout.seams)}" if layout.seams else "none",
    }


def layers_text(layers: Iterable[int]) -> str:
    """Return layers in words: ``layers 0-1, 3``."""
    layers = tuple(layers)
    return f"layer{'s' * (len(layers) > 1)} {number_ranges(layers, ', ')}"


def _padding(padding: Padding) -> str:
    if not padding.nbytes:
        return "none"
    places = (
        (place, getattr(padding, f"{place}_nbytes")) for place in ("between", "before", "after", "block", "unused")
    )
    return f"{exact(padding.nbytes)}, {percent(padding.share)}\n" + ", ".join(
        f"{place} {exact(nbytes)}" for place, nbytes in places if nbytes)  # fmt: skip


def add_pictures(parser: Any) -> None:
    """Add the arguments of :func:`pictures`."""
    parser.add_argument("--picture", action="store_true", help="draw one block's bytes below the facts")
    parser.add_argument("--svg", metavar="FILE", help="write the picture as SVG")
    parser.add_argument("--block", type=whole, default=0, metavar="N", help="the block that is drawn (default 0)")


def pictures(args: argparse.Namespace, layout: KVLayout) -> str | None:
    """Write the picture that the arguments name, and return the one for the screen, or None.

    Raises:
        BlockIndexError: the layout has no such block.
        KVPlanError: a picture for the screen together with JSON, a file that cannot be written, or a block of too many
            runs.
    """
    if not 0 <= args.block < layout.num_blocks:
        raise BlockIndexError(f"--block {args.block}; blocks are 0 to {layout.num_blocks - 1}")
    if args.json and args.picture:
        raise KVPlanError("--picture draws in the terminal and --json prints one object; give one of the two")
    if args.svg is not None:
        check_file("--svg", args.svg)
    if not args.picture and args.svg is None:
        return None
    from kvplan.draw.block import block_picture
    from kvplan.draw.svg import svg
    from kvplan.draw.text import block_lines

    picture = block_picture(layout.built, args.block)
    if args.svg is not None:
        write_file("--svg", args.svg, svg(picture).encode())
    return "\n".join(block_lines(picture, shutil.get_terminal_size().columns)) if args.picture else None


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

    def blocks(self) -> Iterator[Any]:
        """Yield a table for each layout."""
        for layout in self.layouts:
            first, more = layout.places[0], len(layout.places) - SHOWN_PLACES
            region = f"{first.region}, {first.offset:,} bytes from its first byte"
            yield Table([
                ("layout", f"{layout.notation}{ADDRESSES[layout.addresses]}"),
                ("asked", f"{nbytes_text(self.nbytes)} at {self.address:#x}"),
                *([("region", region)] if first.kind != "outside" else []),
                *((f"{place.address:#x}", place.words) for place in layout.places[:SHOWN_PLACES]),
                *([("", f"and {count_of(more, 'more line')}; --json has all of it")] if more > 0 else []),
            ])  # fmt: skip


def add_which(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.epilog = """examples:
  kvplan which 16@0x7f0000002000 examples/specs/gpu_split_kv.toml
  kvplan which 4096@0x7f3c00100000 dump.json    # of layout.save("dump.json")"""
    parser.add_argument("what", type=span, metavar="WHAT", help="BYTES@ADDRESS, or an ADDRESS: decimal, or hex as 0x7f")
    parser.add_argument("layout", metavar="SPEC", help=SOURCE)
    add_layout(parser)
    parser.add_argument("--overlay", action="append", default=[], metavar="SPEC",
                        help="another file whose layout covers the same memory (may be repeated)")  # fmt: skip


def run_which(args: argparse.Namespace, tell: Tell) -> WhichAnswer:
    """Return the places; a finding if no layout has content at every byte."""
    layout = read_layout(args.layout, args.sizes, args.dtype, args.device)
    return which([layout, *map(read_layout, args.overlay)], *args.what)


def which(layouts: Iterable[KVLayout], nbytes: int, address: int) -> WhichAnswer:
    """Return what layouts hold at an address."""
    placed = tuple(Placed.of(layout, places=tuple(map(_place, locate(layout, address, nbytes)))) for layout in layouts)
    content = any(all(place.kind == "content" for place in layout.places) for layout in placed)
    return WhichAnswer(address, nbytes, content, placed, status=int(not content))


def _place(place: Place) -> PlaceFacts:
    component = place.component
    layer, part = (None, None) if component is None else (component.layer, component.part)
    return PlaceFacts.of(place, layer=layer, part=part, words=str(place))
