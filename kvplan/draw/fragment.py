"""Show a layout in a notebook as HTML: a table of facts, and the picture of block 0."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from kvplan.base.numbers import nbytes_text, number_ranges, percent
from kvplan.draw.block import block_picture
from kvplan.draw.svg import block_svg
from kvplan.errors import LayoutError
from kvplan.layout.components import ADDRESSES, Built
from kvplan.layout.padding import padding_of
from kvplan.layout.strides import extent


def layout_html(layout: Built, layers: Sequence[int], heads: range, addresses: str) -> str:
    """Return a layout as HTML without scripts or links; its styles do not affect the page around it.

    Args:
        layout: plain data of the layout.
        layers, heads: global numbers of its layers and heads.
        addresses: the value of :attr:`kvplan.KVLayout.addresses`.

    >>> from kvplan import KVLayout
    >>> layout = KVLayout.from_spec({"notation": "block token dim", "sizes": {"block": 4, "token": 16, "dim": 64}})
    >>> layout._repr_html_().startswith('<div class="kvplan-layout"><table>')
    True
    """
    try:
        picture = block_svg(block_picture(layout))
    except LayoutError:  # too many runs to draw: show the facts without a picture
        picture = ""
    forms = [component.form for component in layout.components]
    token_nbytes = sum(extent(form.head) * extent(form.dim) for form in forms if not form.opaque)
    whole = "sub-block" if layout.opaque and layout.block_tokens > 1 else "block"
    slots = "token" if whole == "block" else whole
    padding = padding_of(layout)
    facts = {
        "layout": layout.notation,
        "content": f"{layout.dtype} on {layout.device}{ADDRESSES[addresses]}",
        "layers": _numbers(layers),
        "parts": ", ".join(layout.parts),
        "heads": _numbers(heads) if any(form.headed for form in forms) else "no axis of heads",
        "blocks": f"{layout.num_blocks:,} of {layout.block_tokens:,} {slots}{'s' * (layout.block_tokens != 1)}",
        "a token": nbytes_text(token_nbytes) if token_nbytes else f"no token slots; {whole}s move whole",
        "a block": nbytes_text(layout.block_nbytes),
        "all blocks": nbytes_text(layout.num_blocks * layout.block_nbytes),
        "padding": f"{nbytes_text(padding.nbytes)}, {percent(padding.share)}" if padding.nbytes else "none",
    }
    rows = "".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in facts.items())
    return f'<div class="kvplan-layout"><table>{rows}</table>{picture}</div>'


def _numbers(numbers: Sequence[int]) -> str:
    """Return the count of the numbers, and the numbers, as text.

    >>> _numbers([0, 2, 3])
    '3 (0, 2-3)'
    """
    return f"{len(numbers):,} ({number_ranges(numbers, ', ')})"
