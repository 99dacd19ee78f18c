"""Print notes, tables of at most 80 columns, and progress bars."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from threading import Timer
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

PATIENCE = 2.0  # seconds before a command that mostly takes less shows its progress
Tell = Callable[[float | None, str], None]  # of the share done (1 is all, None unknown) and a text


def note(text: str) -> None:
    """Print one line to standard error; it is not part of the answer."""
    print(text, file=sys.stderr)


def show(*shown: RenderableType) -> None:
    """Print text and tables with empty lines between them. The library rich reads NO_COLOR and COLUMNS."""
    from rich.console import Console

    console = Console(markup=False, highlight=False, emoji=False)
    for k, one in enumerate(shown):
        with console.capture() as capture:
            console.print(one)
        print("\n" * (k > 0) + "\n".join(line.rstrip() for line in capture.get().splitlines()))


def fact_table(rows: Iterable[tuple[str, str]]) -> Table:
    """Return a table of two columns: names and values."""
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def number_table(header: Sequence[str], rows: Iterable[Sequence[str]], *, right: Sequence[int]) -> Table:
    """Return a table with a line under its header.

    Args:
        right: columns aligned on the right.
    """
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, header_style="bold", pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    for k, title in enumerate(header):
        table.add_column(title, justify="right" if k in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


@contextmanager
def progress(*, silent: bool = False, after: float = 0.0) -> Iterator[Tell]:
    """Show a progress bar on standard error if that is a terminal.

    Args:
        silent: whether to show no bar.
        after: seconds before the bar appears.

    Yields:
        A function that takes the share that is done, and a text.
    """
    if silent or not sys.stderr.isatty():
        yield _silent
        return
    from rich import progress as rich
    from rich.console import Console

    columns = (rich.BarColumn(24), rich.TimeElapsedColumn(), rich.TextColumn("{task.description}", markup=False))
    bar = rich.Progress(*columns, console=Console(stderr=True), transient=True)
    task = bar.add_task("starting", total=None)
    timer = Timer(after, bar.start)
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


def _silent(share: float | None, text: str) -> None:
    """Show nothing."""
    del share, text
