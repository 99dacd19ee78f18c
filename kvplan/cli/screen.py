"""Print answers at most as wide as the terminal, with notes, progress, pictures; and write files whole."""

from __future__ import annotations

import argparse
import errno
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from threading import Timer
from typing import Any

from kvplan.base.files import write_whole
from kvplan.cli.answer import Table, schema_of
from kvplan.cli.arguments import whole
from kvplan.errors import BlockIndexError, KVPlanError, LayoutError
from kvplan.layout.kvlayout import KVLayout

__all__ = ["add_pictures", "check_file", "note", "pictures", "progress", "schema_of", "show", "write_file"]

PATIENCE = 2.0  # seconds before a command shows its progress
WIDE_ENOUGH = 60  # columns; a narrower terminal shows a picture only with --picture
LABEL = 30  # characters of a label that is not folded
STYLES = {"ok": "green", "warning": "yellow", "problem": "bold red", "unknown": "dim"}
Tell = Callable[[float | None, str], None]  # of the share done (1 is all, None unknown) and a text


def note(text: str) -> None:
    """Print one line to standard error; it is not part of the answer."""
    print(text, file=sys.stderr)


def show(blocks: Iterable[Any]) -> None:
    """Print tables and text with empty lines between them. The library rich reads NO_COLOR and COLUMNS."""
    for k, block in enumerate(blocks):
        text = block if isinstance(block, str) else rendered(block)
        print("\n" * (k > 0) + "\n".join(line.rstrip() for line in text.splitlines()))


def rendered(block: Any) -> str:
    from rich.console import Console

    console = Console(markup=False, highlight=False, emoji=False)
    with console.capture() as capture:
        console.print(rich_table(block) if isinstance(block, Table) else block)
    return capture.get()


def rich_table(block: Table) -> Any:
    from rich import box
    from rich import table as rich

    if not block.header:
        grid = rich.Table.grid(padding=(0, 2))
        columns = max(map(len, block.rows), default=1)
        for k in range(1, columns + 1):
            short = k < columns and max(len(row[k - 1]) for row in block.rows) <= LABEL
            grid.add_column(style="cyan" if k < columns else "", no_wrap=short, overflow="fold")
        for row in block.rows:
            grid.add_row(*row, style=STYLES.get(row[0]))
        return grid
    table = rich.Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    for k, title in enumerate(block.header):
        table.add_column(title, justify="right" if k in block.right else "left", overflow="fold")
    for row in block.rows:
        table.add_row(*row)
    return table


@contextmanager
def progress(*, silent: bool = False) -> Iterator[Tell]:
    """Show a progress bar on standard error after :data:`PATIENCE`, if that is a terminal.

    Yields:
        A function that takes the share that is done, and a text.
    """
    if silent or not sys.stderr.isatty():
        yield lambda *_: None
        return
    from rich import progress as rich
    from rich.console import Console

    columns = (rich.BarColumn(24), rich.TimeElapsedColumn(), rich.TextColumn("{task.description}", markup=False))
    bar = rich.Progress(*columns, console=Console(stderr=True), transient=True)
    task = bar.add_task("starting", total=None)
    timer = Timer(PATIENCE, bar.start)
    timer.daemon = True
    timer.start()
    try:
        yield lambda share, text: bar.update(
            task, description=text, completed=share or 0, total=None if share is None else 1
        )
    finally:
        timer.cancel()
        timer.join()
        bar.stop()


def write_file(option: str, name: str, content: bytes) -> None:
    """Write a file completely or not at all, so that no reader sees half of it.

    Raises:
        KVPlanError: it cannot be written.
    """
    with _writable(option, name):
        write_whole(Path(name), content)


def check_file(option: str, name: str, *, folder: bool = False) -> None:
    """Check that a file can be written, before a command works and prints.

    Args:
        option: the option that names the file.
        name: the file.
        folder: whether to make its folder if it is missing.

    Raises:
        KVPlanError: it cannot be written.
    """
    with _writable(option, name):
        path = Path(os.path.realpath(name))
        if folder:
            path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir() or not path.name:
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), name)
        if not path.exists() or path.is_file():  # pipes and devices are written directly
            with TemporaryFile(dir=path.parent):  # as the new content is: in the folder of the file
                pass


@contextmanager
def _writable(option: str, name: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", "") or error
        raise KVPlanError(f"{option} {name!r} cannot be written: {why}") from None


def add_pictures(parser: Any) -> None:
    """Add the arguments of :func:`pictures`."""
    asked = "draw one block's bytes below the facts (default on a terminal where they fit)"
    parser.add_argument("--picture", action="store_true", help=asked)
    parser.add_argument("--svg", metavar="FILE", help="write the picture as SVG")
    parser.add_argument("--block", type=whole, default=0, metavar="N", help="the block that is drawn (default 0)")


def pictures(args: argparse.Namespace, layout: KVLayout) -> Any:
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
    size = shutil.get_terminal_size()
    uninvited = not args.json and sys.stdout.isatty() and size.columns >= WIDE_ENOUGH
    if not (args.picture or args.svg is not None or uninvited):
        return None
    from kvplan.draw.block import block_picture
    from kvplan.draw.svg import colours, svg
    from kvplan.draw.text import block_lines

    try:
        picture = block_picture(layout.built, args.block)
    except LayoutError:
        if args.picture or args.svg is not None:
            raise
        return None  # nobody asked for it
    if args.svg is not None:
        write_file("--svg", args.svg, svg(picture).encode())
    lines = block_lines(picture, size.columns)
    if not (args.picture or (uninvited and len(lines) < size.lines)):
        return None
    from rich.text import Text

    styles = {**colours(picture.parts), "gap": "dim", "bold": "bold", "": ""}
    return Text("\n").join(Text.assemble(*((span.text, styles[span.part]) for span in line)) for line in lines)
