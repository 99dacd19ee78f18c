"""``kvplan inspect``: print the facts of a layout and the place of its bytes."""

from __future__ import annotations

import argparse

from kvplan.cli.answers.layout_facts import layout_facts
from kvplan.cli.answers.layout_rows import axis_rows, summary_rows, view_title
from kvplan.cli.arguments.sources import add_layout, layout_of
from kvplan.cli.screen.documents import print_json
from kvplan.cli.screen.pictures import add_pictures, check_pictures, draw_pictures
from kvplan.cli.screen.printing import fact_table, number_table, show

EXAMPLES = """examples:
  kvplan inspect examples/specs/gpu_split_kv.toml
  kvplan inspect "layer: block token dim" \\
      --sizes layer=61,block=1024,token=64,dim=576
  kvplan inspect examples/specs/gpu_split_kv.toml --picture --svg block.svg
  kvplan inspect --model llama-3.1-70b --engine vllm --tp 4 --host page-first
  kvplan inspect --model --help"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
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
    axes = (
        number_table((view_title(view, facts), "extent", "stride in bytes"), axis_rows(view), right=(1, 2))
        for view in facts["views"]
    )
    show(fact_table(summary_rows(facts)), *axes)
    draw_pictures(args, layout)
    return 0
