"""The facts of a layout in words, and what a notebook shows of layouts, programs and reshardings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from kvplan.base.numbers import count_of, exact, number_ranges, percent
from kvplan.draw.block import block_picture
from kvplan.draw.page import table, text
from kvplan.draw.svg import svg
from kvplan.errors import IncompatibleLayoutsError, LayoutError
from kvplan.layout.address_ranges import Padding, padding_of
from kvplan.layout.components import ADDRESSES, Component
from kvplan.layout.kvlayout import KVLayout
from kvplan.layout.strides import extent
from kvplan.layout.views import token_nbytes
from kvplan.program.passes import compile_geometry

SHOWN_REGIONS = 8
PLACES = ("between", "before", "after", "block", "unused")  # of padding


def layout_facts(layout: KVLayout) -> dict[str, str]:
    """Return the facts of a layout in words; layers that differ have a line for each kind.

    >>> from kvplan import KVLayout
    >>> spec = {"notation": "block token dim", "sizes": {"block": 4, "token": 16, "dim": 64}}
    >>> layout_facts(KVLayout.from_spec(spec))["contiguous"]
    'a block is 1 extent of 2,048 bytes (2 KiB)'
    """
    opaque = [part for part in layout.parts if layout.slice(parts=(part,)).opaque]
    headed = any(component.form.headed for component in layout.components)
    whole = "sub-block" if layout.opaque and layout.block_tokens > 1 else "block"
    token = token_nbytes(layout)
    without = f", without {', '.join(opaque)}: its blocks move whole" * bool(opaque)
    kinds, regions = _kinds(layout), Counter(region.nbytes for region in layout.regions)
    counts = [f"{count:,} x {exact(nbytes)}" for nbytes, count in regions.most_common(SHOWN_REGIONS)]
    more = len(regions) - SHOWN_REGIONS
    return {
        "layout": layout.notation,
        "content": f"{layout.dtype} on {layout.device}{ADDRESSES[layout.addresses]}",
        "layers": _numbers(layout.layers),
        **({layers_text(layers): each for each, layers in kinds.items()} if len(kinds) > 1 else {}),
        "parts": ", ".join(layout.parts),
        "heads": _numbers(layout.heads) if headed else "no axis of heads",
        "blocks": f"{layout.num_blocks:,} of {count_of(layout.block_tokens, 'token' if whole == 'block' else whole)}",
        "a token": f"none: {whole}s move whole" if token is None else exact(token) + without,
        "a block": exact(layout.block_nbytes),
        "all blocks": exact(layout.nbytes),
        "padding": _padding(padding_of(layout.built)),
        "contiguous": _contiguous(layout),
        "regions": "\n".join([*counts, *([f"and {more:,} other sizes"] if more > 0 else [])]),
        "seams": f"{len(layout.seams)}" if layout.seams else "none",
    }


def layers_text(layers: Sequence[int]) -> str:
    """Return layers in words: ``layers 0-1, 3``."""
    return f"layer{'s' * (len(layers) > 1)} {number_ranges(layers, ', ')}"


def _numbers(numbers: Sequence[int]) -> str:
    return f"{len(numbers):,} ({number_ranges(numbers, ', ')})"


def _kinds(layout: KVLayout) -> dict[str, list[int]]:
    """Return the layers of each kind, by what a layer of it holds in words."""
    layers: dict[int, dict[str, list[Component]]] = {}
    for component in layout.components:
        layers.setdefault(component.layer, {}).setdefault(component.part, []).append(component)
    kinds: dict[str, list[int]] = {}
    for layer, parts in sorted(layers.items()):
        alike: dict[str, list[str]] = {}
        for part, components in parts.items():
            alike.setdefault(_content(components), []).append(part)
        kinds.setdefault("; ".join(f"{', '.join(names)}: {each}" for each, names in alike.items()), []).append(layer)
    return kinds


def _content(components: list[Component]) -> str:
    form, heads = components[0].form, sum(extent(c.form.head) for c in components)
    where = f"{count_of(heads, 'head')} of " if form.headed else ""
    return f"{where}{extent(form.dim):,} bytes{' a token' * (not form.opaque)}"


def _padding(padding: Padding) -> str:
    if not padding.nbytes:
        return "none"
    places = ((place, getattr(padding, f"{place}_nbytes")) for place in PLACES)
    named = ", ".join(f"{place} {exact(nbytes)}" for place, nbytes in places if nbytes)
    return f"{exact(padding.nbytes)}, {percent(padding.share)}\n{named}"


def _contiguous(layout: KVLayout) -> str:
    try:
        count, low, high = compile_geometry(layout.geometry, layout.geometry).extents("src")
    except IncompatibleLayoutsError:
        return "in too many extents to count"
    return f"a block is {count_of(count, 'extent')} of {exact(high) if low == high else f'{low:,} to {exact(high)}'}"


def layout_html(layout: KVLayout) -> str:
    """Return the facts of a layout as HTML, with the picture of block 0.

    >>> from kvplan import KVLayout
    >>> layout = KVLayout.from_spec({"notation": "block token dim", "sizes": {"block": 4, "token": 16, "dim": 64}})
    >>> "<th>a block</th><td>2,048 bytes (2 KiB)</td>" in layout._repr_html_()
    True
    """
    try:
        picture = svg(block_picture(layout.built))
    except LayoutError:  # too many runs to draw: show the facts without a picture
        picture = ""
    return f'<div class="kvplan">{table(layout_facts(layout).items())}{picture}</div>'


def text_html(words: str, picture: str) -> str:
    """Return text and a picture as HTML, without scripts or links."""
    return f'<div class="kvplan">{text(words)}{picture}</div>'
