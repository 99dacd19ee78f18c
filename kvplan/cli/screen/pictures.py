"""Pictures of one block, for the commands that have a layout: in the terminal, as SVG, as PNG."""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from kvplan.base.files import write_whole
from kvplan.base.quoting import quoted
from kvplan.errors import BlockIndexError, KVPlanError, LayoutError
from kvplan.layout.kvlayout import KVLayout

if TYPE_CHECKING:
    from kvplan.draw.text import Line

WIDE_ENOUGH = 60  # columns: in less, nobody sees a picture that was not asked for


def add_pictures(parser: argparse.ArgumentParser) -> None:
    """Arguments that ask for pictures; read by :func:`check_pictures` and :func:`draw_pictures`."""
    asked = "draw one block's bytes below the facts; a terminal where it fits needs no asking"
    parser.add_argument("--picture", action="store_true", help=asked)
    parser.add_argument("--svg", metavar="FILE", help="write that picture as SVG")
    parser.add_argument("--png", metavar="FILE", help="write that picture as PNG (needs cairosvg)")
    parser.add_argument("--block", type=_block, default=0, metavar="N", help="the block that is drawn (default 0)")


def check_pictures(args: argparse.Namespace, layout: KVLayout) -> None:
    """Refuse what cannot be drawn, before anything is printed.

    Raises:
        BlockIndexError: no such block.
        KVPlanError: a picture for the terminal beside JSON.
    """
    if not 0 <= args.block < layout.num_blocks:
        raise BlockIndexError(f"--block {args.block}; blocks are 0 to {layout.num_blocks - 1}")
    if args.json and args.picture:
        raise KVPlanError("--picture draws in the terminal and --json prints one object; ask for one of them")


def draw_pictures(args: argparse.Namespace, layout: KVLayout) -> None:
    """Print and write the pictures that were asked for.

    Raises:
        KVPlanError: a file that cannot be written, PNG without cairosvg, or a block of too many runs to draw.
    """
    size = shutil.get_terminal_size()
    uninvited = not args.json and sys.stdout.isatty() and size.columns >= WIDE_ENOUGH
    wanted = args.svg is not None or args.png is not None
    if not (args.picture or wanted or uninvited):
        return
    from kvplan.draw.block import block_picture

    try:
        picture = block_picture(layout, args.block)
    except LayoutError:
        if args.picture or wanted:
            raise
        return  # nobody asked for what cannot be drawn
    if wanted:
        from kvplan.draw.svg import block_svg

        svg = block_svg(picture)
        if args.svg is not None:
            _write("--svg", args.svg, svg.encode())
        if args.png is not None:
            from kvplan.draw.png import png_of

            _write("--png", args.png, png_of(svg))
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


def _write(option: str, name: str, content: bytes) -> None:
    """Write a file whole or not at all: a reader never sees half of it."""
    try:
        write_whole(Path(name), content)
    except OSError as error:
        raise KVPlanError(f"{option} {name!r} cannot be written: {error.strerror or error}") from None


def _block(text: str) -> int:
    if not (text.isascii() and text.isdigit()) or len(text) > 18:
        raise argparse.ArgumentTypeError(f"{quoted(text)} is no block id; give a number from 0")
    return int(text)
