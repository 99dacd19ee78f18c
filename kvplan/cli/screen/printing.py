"""Print tables of at most 80 columns, and numbers in words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table


def show(*shown: RenderableType) -> None:
    """Print text and tables as they stand, an empty line between; rich itself heeds NO_COLOR and COLUMNS."""
    from rich.console import Console

    console = Console(markup=False, highlight=False, emoji=False)
    for k, one in enumerate(shown):
        with console.capture() as capture:
            console.print(one)
        print("\n" * (k > 0) + "\n".join(line.rstrip() for line in capture.get().splitlines()))


def fact_table(rows: Iterable[tuple[str, str]]) -> Table:
    """Two columns: names, and what they are."""
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def number_table(header: Sequence[str], rows: Iterable[Sequence[str]], *, right: Sequence[int]) -> Table:
    """A table with a rule under its header.

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
