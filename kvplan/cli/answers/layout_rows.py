"""Rows of words with the facts of a layout, for the terminal and for a page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from kvplan.base.numbers import count_of, exact, number_ranges, percent
from kvplan.layout.components import ADDRESSES

SHOWN_REGIONS = 8


def _slots(facts: dict[str, Any]) -> str:
    """Return the token slots of a block, or its opaque sub-blocks, as text."""
    return count_of(facts["block_tokens"], "sub-block" if _whole(facts) == "sub-blocks" else "token")


def _whole(facts: dict[str, Any]) -> str:
    """Return the name of the piece that moves whole if blocks have no token slots."""
    return "sub-blocks" if facts["token_nbytes"] is None and facts["block_tokens"] > 1 else "blocks"


def summary_rows(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """Return a layout as rows, one for each fact."""
    layers, heads, token = facts["layers"], facts["heads"], facts["token_nbytes"]
    headed = any(axis["axis"] == "head" for view in facts["views"] for axis in view["axes"])
    return [
        ("layout", facts["notation"]),
        ("content", f"{facts['dtype']} on {facts['device']}{ADDRESSES[facts['addresses']]}"),
        ("layers", f"{len(layers):,} ({number_ranges(layers, ', ')})"),
        ("parts", ", ".join(facts["parts"])),
        ("heads", f"{len(heads):,} ({number_ranges(heads, ', ')})" if headed else "no axis of heads"),
        ("blocks", f"{facts['num_blocks']:,} of {_slots(facts)}"),
        ("a token", f"none: {_whole(facts)} move whole" if token is None else exact(token)),
        ("a block", exact(facts["block_nbytes"])),
        ("all blocks", exact(facts["nbytes"])),
        *padding_rows(facts),
        ("contiguous", f"a block is {_extents(facts['block_extents'])}"),
        ("regions", _regions(facts["regions"])),
        ("seams", f"{len(facts['seams']):,}" if facts["seams"] else "none"),
    ]


def padding_rows(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Return rows with the bytes of padding, their places, and the padding of each block."""
    padding, nbytes = facts["padding"], facts["padding_nbytes"]
    yield "padding", padding_words(facts)
    outside = [f"{exact(padding[f'{where}_nbytes'])} {where} all content" for where in ("before", "after")
               if padding[f"{where}_nbytes"]]  # fmt: skip
    if outside:
        between = [f"{exact(padding['between_nbytes'])} between content"] if padding["between_nbytes"] else []
        yield "", ", ".join([*between, *outside])
    elif nbytes:
        yield "", "the regions end with the last byte of content"
    if nbytes and padding["block_nbytes"]:
        wasted, held = padding["block_nbytes"], padding["block_nbytes"] + facts["block_nbytes"]
        yield "waste", f"{exact(wasted)} a block of {held:,}, {percent(wasted / held)}"
    if padding["unused_nbytes"]:
        yield "unused", f"{exact(padding['unused_nbytes'])} in regions that hold nothing of this layout"


def padding_words(facts: dict[str, Any]) -> str:
    """Return padding as text: in bytes, and as a share of the regions that hold content."""
    if not facts["padding_nbytes"]:
        return "none"
    return f"{exact(facts['padding_nbytes'])}, {percent(facts['padding']['share'])}"


def _extents(extents: dict[str, int]) -> str:
    low, high, count = extents["min_nbytes"], extents["max_nbytes"], extents["count"]
    return f"{count_of(count, 'extent')} of {exact(high) if low == high else f'{low:,} to {exact(high)}'}"


def _regions(regions: list[dict[str, Any]]) -> str:
    """Return the number of regions of each size, one line per size."""
    sizes = Counter(region["nbytes"] for region in regions)
    lines = [f"{count:,} x {exact(nbytes)}" for nbytes, count in sizes.most_common(SHOWN_REGIONS)]
    if len(sizes) > SHOWN_REGIONS:
        lines.append(f"and {len(sizes) - SHOWN_REGIONS:,} other sizes")
    return "\n".join(lines)


def view_title(view: dict[str, Any], facts: dict[str, Any]) -> str:
    """Return the parts and layers that a table of axes describes."""
    layers = "" if view["layers"] == facts["layers"] else f", layers {number_ranges(view['layers'], ', ')}"
    return f"{', '.join(view['parts'])}{layers}"


def axis_rows(view: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Return a row for each axis. A split axis shows its factors side by side, the outer one first."""
    rows = []
    for axis in view["axes"]:
        factors = axis["factors"]
        if not factors and axis["axis"] in ("layer", "part"):
            continue
        strides = ["separate" if factor["stride"] is None else f"{factor['stride']:,}" for factor in factors]
        extents = [f"{factor['extent']:,}" for factor in factors]
        name = "dim (bytes)" if axis["axis"] == "dim" else axis["axis"]
        rows.append((name, " x ".join(extents) or "1", ", ".join(strides) or "-"))
    return rows
