"""``kvplan inspect``: the facts of a layout and the place of its bytes; of a model with --model or --config."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterable
from dataclasses import field, replace
from typing import Any

from kvplan.base.numbers import binary, count_of, exact, number_ranges, percent
from kvplan.cli import model
from kvplan.cli.answer import Answer, Part, Table, facts, words
from kvplan.cli.arguments import SOURCE, add_layout, read_layout
from kvplan.cli.screen import Tell, add_pictures, pictures
from kvplan.errors import KVPlanError
from kvplan.layout.components import ADDRESSES, Region
from kvplan.layout.kvlayout import KVLayout
from kvplan.layout.padding import Padding, padding_of
from kvplan.layout.views import View, token_nbytes, views
from kvplan.plan.copy_program import compile_quietly
from kvplan.program.program import Extents

EXAMPLES = """examples:
  kvplan inspect examples/specs/gpu_split_kv.toml --picture --svg block.svg
  kvplan inspect --model llama-3.1-70b --engine vllm --tp 4 --host page-first
  kvplan inspect --config path/to/config.json --block-tokens 64"""
SHOWN_REGIONS = 8


def times(count: int, low: int, high: int, noun: str = "run") -> str:
    """Return a count with its sizes in words.

    >>> times(160, 8192, 8192), times(2, 512, 8192, "extent")
    ('160 runs of 8 KiB', '2 extents of 512 to 8,192 bytes (8 KiB)')
    """
    return f"{count_of(count, noun)} of {binary(high) if low == high else f'{low:,} to {exact(high)}'}"


def _sub(layout: LayoutAnswer) -> bool:
    """Return whether blocks have opaque sub-blocks and no token slots."""
    return layout.token_nbytes is None and layout.block_tokens > 1


def _token(layout: LayoutAnswer) -> str:
    if layout.token_nbytes is None:
        return f"none: {'sub-blocks' if _sub(layout) else 'blocks'} move whole"
    without = f", without {', '.join(layout.opaque)}: its blocks move whole" if layout.opaque else ""
    return exact(layout.token_nbytes) + without


def _padding(layout: LayoutAnswer) -> str:
    if not layout.padding_nbytes:
        return "none"
    return f"{exact(layout.padding_nbytes)}, {percent(layout.padding.share)}\n{layout.padding}"


def _contiguous(layout: LayoutAnswer) -> str:
    count, low, high = layout.block_extents
    return f"a block is {count_of(count, 'extent')} of {exact(high) if low == high else f'{low:,} to {exact(high)}'}"


def _regions(layout: LayoutAnswer) -> str:
    """Return the number of regions of each size, a line a size."""
    counts = Counter(region.nbytes for region in layout.regions)
    lines = [f"{count:,} x {exact(nbytes)}" for nbytes, count in counts.most_common(SHOWN_REGIONS)]
    more = len(counts) - SHOWN_REGIONS
    return "\n".join([*lines, f"and {more:,} other sizes"] if more > 0 else lines)


class PaddingFacts(
    Part, sources=(Padding,), names="share between_nbytes before_nbytes after_nbytes block_nbytes unused_nbytes"
):
    """Bytes that are not content."""

    shown = "between_nbytes, before_nbytes, after_nbytes, block_nbytes, unused_nbytes"


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
    shown = {
        "layout": "notation",
        "content": lambda a: f"{a.dtype} on {a.device}{ADDRESSES[a.addresses]}",
        "layers": "layers",
        "parts": "parts",
        "heads": lambda a: words("heads", a.heads) if a.headed else "no axis of heads",
        "blocks": lambda a: f"{a.num_blocks:,} of {count_of(a.block_tokens, 'sub-block' if _sub(a) else 'token')}",
        "a token": _token,
        "a block": "block_nbytes",
        "all blocks": "nbytes",
        "padding": _padding,
        "contiguous": _contiguous,
        "regions": _regions,
        "seams": lambda a: len(a.seams) or "none",
    }
    heads: tuple[int, ...]
    token_nbytes: int | None
    padding_nbytes: int
    padding: PaddingFacts
    block_extents: Extents
    views: tuple[View, ...]
    regions: tuple[RegionFacts, ...]
    seams: tuple[int, ...]
    opaque: tuple[str, ...] = field(default=(), kw_only=True)
    headed: bool = field(default=True, kw_only=True)
    picture: Any = field(default=None, kw_only=True)

    @classmethod
    def read(cls, layout: KVLayout) -> LayoutAnswer:
        """Return the facts of a layout."""
        padding = padding_of(layout.built)
        headed = {head for component in layout.components if component.form.headed for head in component.form.heads}
        return cls.of(
            layout,
            heads=tuple(sorted(headed) or layout.heads),
            token_nbytes=token_nbytes(layout),
            padding_nbytes=padding.nbytes,
            padding=PaddingFacts.of(padding),
            block_extents=compile_quietly(layout, layout).program.extents("src"),
            views=views(layout),
            regions=tuple(RegionFacts.of(region) for region in sorted(layout.regions, key=lambda one: one.address)),
            opaque=tuple(part for part in layout.parts if layout.slice(parts=(part,)).opaque),
            headed=bool(headed),
        )

    def blocks(self) -> Iterable[Any]:
        """Return the facts, the axes of each view, and the picture."""
        tables = (self._axes(view) for view in self.views)
        return [facts(self), *tables, *([] if self.picture is None else [self.picture])]

    def _axes(self, view: View) -> Table:
        """Return a row for each axis. A split axis shows its factors side by side, the outer one first."""
        layers = "" if view.layers == self.layers else f", layers {number_ranges(view.layers, ', ')}"
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.epilog = EXAMPLES
    source = parser.add_mutually_exclusive_group()
    source.add_argument("layout", metavar="SPEC", nargs="?", help=SOURCE)
    source.add_argument("--model", nargs="?", const="", metavar="NAME", help="of the catalogue; without NAME, list all")
    source.add_argument("--config", metavar="FILE", help="a config.json of Hugging Face")
    add_layout(parser.add_argument_group("of a SPEC"))
    model.add_arguments(parser.add_argument_group("of a model"))
    add_pictures(parser.add_argument_group("pictures"))


def run(args: argparse.Namespace, tell: Tell) -> Answer:
    """Return the facts of a layout, or of a model's cache."""
    if args.layout is args.model is args.config is None:
        raise KVPlanError(
            "the following arguments are required: SPEC, --model or --config; see 'kvplan inspect --help'"
        )
    of_model = args.layout is None
    for option in ("sizes", "device") if of_model else model.OPTIONS:
        if getattr(args, option) is not None:
            name, other = option.replace("_", "-"), "a SPEC, not with --model" if of_model else "--model or --config"
            raise KVPlanError(f"unrecognized arguments: --{name} goes with {other}")
    if of_model:
        return model.run(args)
    layout = read_layout(args.layout, args.sizes, args.dtype, args.device)
    return replace(LayoutAnswer.read(layout), picture=pictures(args, layout))
