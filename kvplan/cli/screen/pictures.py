"""Draw one block of a layout: in the terminal, as SVG, as PNG."""

from __future__ import annotations

import argparse
import shutil
import sys
from typing import TYPE_CHECKING

from kvplan.cli.arguments.values import whole
from kvplan.cli.screen.documents import check_file, write_file
from kvplan.errors import BlockIndexError, KVPlanError, LayoutError
from kvplan.layout.kvlayout import KVLayout

if TYPE_CHECKING:
    from kvplan.draw.text import Line

WIDE_ENOUGH = 60  # columns; a narrower terminal shows a picture only with --picture


def add_pictures(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of pictures; :func:`check_pictures` and :func:`draw_pictures` read them."""
    asked = "draw one block's bytes below the facts (default on a terminal where they fit)"
    parser.add_argument("--picture", action="store_true", help=asked)
    parser.add_argument("--svg", metavar="FILE", help="write the picture as SVG")
    parser.add_argument("--png", metavar="FILE", help="write the picture as PNG (needs cairosvg)")
    parser.add_argument("--block", type=whole, default=0, metavar="N", help="the block that is drawn (default 0)")


def check_pictures(args: argparse.Namespace, layout: KVLayout) -> None:
    """Raise an error for a picture that cannot be drawn, before the command prints.

    Raises:
        BlockIndexError: the layout has no such block.
        KVPlanError: a picture for the terminal together with JSON, a file that cannot be written, or no cairosvg.
    """
    if not 0 <= args.block < layout.num_blocks:
        raise BlockIndexError(f"--block {args.block}; blocks are 0 to {layout.num_blocks - 1}")
    if args.json and args.picture:
        raise KVPlanError("--picture draws in the terminal and --json prints one object; give one of the two")
    for option, name in (("--svg", args.svg), ("--png", args.png)):
        if name is not None:
            check_file(option, name)
    if args.png is not None:
        from kvplan.draw.png import check_png

        check_png()


def draw_pictures(args: argparse.Namespace, layout: KVLayout) -> None:
    """Print and write the pictures that the arguments name.

    Raises:
        KVPlanError: a file cannot be written, cairosvg is not installed, or a block has too many runs to draw.
    """
    size = shutil.get_terminal_size()
    uninvited = not args.json and sys.stdout.isatty() and size.columns >= WIDE_ENOUGH
    wanted = args.svg is not None or args.png is not None
    if not (args.picture or wanted or uninvited):
        return
    from kvplan.draw.block import block_picture

    try:
        picture = block_picture(layout.built, args.block)
    except LayoutError:
        if args.picture or wanted:
            raise
        return  # no argument names it
    if wanted:
        from kvplan.draw.svg import block_svg

        svg = block_svg(picture)
        if args.svg is not None:
            write_file("--svg", args.svg, svg.encode())
        if args.png is not None:
            from kvplan.draw.png import png_of

            write_file("--png", args.png, png_of(svg))
    if args.picture or uninvited:
        from kvplan.draw.text import block_lines, encodable

        lines = block_lines(picture, size.columns, ascii_only=not encodable(sys.stdout.encoding))
        if args.picture or len(lines) < size.lines:
            _print(lines, picture.parts)


def _print(lines: list[Line], parts: tuple[str, ...]) -> None:
    from rich.text import Text

    from kvplan.cli.screen.printing import show
    from kvplan.draw.svg import colours

    styles = {**colours(parts), "gap": "dim", "bold": "bold", "": ""}
    drawn = Text("\n").join(Text.assemble(*((span.text, styles[span.part]) for span in line)) for line in lines)
    print()
    show(drawn)
