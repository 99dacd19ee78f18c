"""``kvplan inspect``: what a layout holds, and where its bytes lie."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator
from typing import Any

from kvplan.base.numbers import count_of, exact, number_ranges, percent
from kvplan.cli.answers.layout_facts import layout_facts
from kvplan.cli.arguments.sources import add_layout, layout_of
from kvplan.cli.screen.documents import print_json
from kvplan.cli.screen.pictures import add_pictures, check_pictures, draw_pictures
from kvplan.cli.screen.printing import fact_table, number_table, show
from kvplan.layout.components import ADDRESSES

EXAMPLES = """examples:
  kvplan inspect examples/specs/gpu_split_kv.toml
  kvplan inspect "layer: block token dim" \\
      --sizes layer=61,block=1024,token=64,dim=576
  kvplan inspect examples/specs/gpu_split_kv.toml --picture --svg block.svg
  kvplan inspect --model llama-3.1-70b --engine vllm --tp 4 --host page-first
  kvplan inspect --model --help"""


SHOWN_REGIONS = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.epilog = EXAMPLES
    add_layout(parser)
    add_pictures(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object (schema kvplan.inspect)")


def run(args: argparse.Namespace) -> int:
    """Print the layout, and draw one block of it."""
    layout = layout_of(args)
    check_pictures(args, layout)
    facts = layout_facts(layout)
    if args.json:
        draw_pictures(args, layout)
        print_json("inspect", facts)
        return 0
    show(
        fact_table(summary_rows(facts)),
        *(
            number_table((view_title(view, facts), "extent", "stride in bytes"), axis_rows(view), right=(1, 2))
            for view in facts["views"]
        ),
    )
    draw_pictures(args, layout)
    return 0


def _slots(facts: dict[str, Any]) -> str:
    """What a block holds: token slots, or opaque sub-blocks."""
    return count_of(facts["block_tokens"], "sub-block" if _whole(facts) == "sub-blocks" else "token")


def _whole(facts: dict[str, Any]) -> str:
    """What of blocks without token slots moves whole."""
    return "sub-blocks" if facts["token_nbytes"] is None and facts["block_tokens"] > 1 else "blocks"


def summary_rows(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """A layout in words, a row a fact."""
    layers, heads = facts["layers"], facts["heads"]
    token = facts["token_nbytes"]
    return [
        ("layout", facts["notation"]),
        ("content", f"{facts['dtype']} on {facts['device']}{ADDRESSES[facts['addresses']]}"),
        ("layers", f"{len(layers):,} ({number_ranges(layers, ', ')})"),
        ("parts", ", ".join(facts["parts"])),
        ("heads", f"{len(heads):,} ({number_ranges(heads, ', ')})" if _headed(facts) else "no axis of heads"),
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
    """How much is padding, where it lies, and what each block wastes."""
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
    """Padding in bytes, and as a share of the regions that hold content."""
    if not facts["padding_nbytes"]:
        return "none"
    return f"{exact(facts['padding_nbytes'])}, {percent(facts['padding']['share'])}"


def _extents(extents: dict[str, int]) -> str:
    low, high = extents["min_nbytes"], extents["max_nbytes"]
    if extents["count"] == 1:
        return f"1 extent of {exact(high)}"
    sizes = exact(high) if low == high else f"{low:,} to {exact(high)}"
    return f"{extents['count']:,} extents of {sizes}"


def _regions(regions: list[dict[str, Any]]) -> str:
    """Regions of equal size counted, a line each."""
    sizes = Counter(region["nbytes"] for region in regions)
    lines = [f"{count:,} x {exact(nbytes)}" for nbytes, count in sizes.most_common(SHOWN_REGIONS)]
    if len(sizes) > SHOWN_REGIONS:
        lines.append(f"and {len(sizes) - SHOWN_REGIONS:,} other sizes")
    return "\n".join(lines)


def _headed(facts: dict[str, Any]) -> bool:
    return any(axis["axis"] == "head" for view in facts["views"] for axis in view["axes"])


def view_title(view: dict[str, Any], facts: dict[str, Any]) -> str:
    """Whose axes these are."""
    layers = "" if view["layers"] == facts["layers"] else f", layers {number_ranges(view['layers'], ', ')}"
    return f"{', '.join(view['parts'])}{layers}"


def axis_rows(view: dict[str, Any]) -> list[tuple[str, str, str]]:
    """A row an axis; factors of a split axis side by side, the outer first."""
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
