"""A layout as a piece of HTML, for notebooks: a table of facts, and the picture of block 0."""

from __future__ import annotations

from html import escape

from kvplan.draw.block import block_picture, nbytes_text
from kvplan.draw.svg import block_svg
from kvplan.errors import LayoutError
from kvplan.layout import KVLayout
from kvplan.slicing import number_ranges
from kvplan.wording import ADDRESSES


def layout_html(layout: KVLayout) -> str:
    """A fragment without scripts, links or styles that reach beyond it.

    >>> layout = KVLayout.from_spec({"notation": "block token dim", "sizes": {"block": 4, "token": 16, "dim": 64}})
    >>> layout_html(layout).startswith('<div class="kvplan-layout"><table>')
    True
    """
    try:
        picture = block_svg(block_picture(layout))
    except LayoutError:  # woven of too many runs to be drawn: the facts stand alone
        picture = ""
    facts = {
        "layout": layout.notation,
        "content": f"{layout.dtype} on {layout.device}{ADDRESSES[layout.addresses]}",
        "layers": f"{len(layout.layers):,} ({number_ranges(layout.layers)})",
        "parts": ", ".join(layout.parts),
        "heads": number_ranges(layout.heads),
        "blocks": f"{layout.num_blocks:,} of {layout.block_tokens:,} token{'s' * (layout.block_tokens != 1)}",
        "a block": nbytes_text(layout.block_nbytes),
        "all blocks": nbytes_text(layout.nbytes),
    }
    rows = "".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in facts.items())
    return f'<div class="kvplan-layout"><table>{rows}</table>{picture}</div>'
