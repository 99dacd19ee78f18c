"""What commands print: JSON documents, and for people numbers in words and tables of at most 80 columns."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvplan.errors import KVPlanError

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

# Version of each command's JSON document. Keys are added freely; a key that changes its meaning or goes raises it.
SCHEMAS = {
    "inspect": 1,
    "inspect-model": 1,
    "models": 1,
    "plan": 1,
    "diff": 1,
    "explain": 1,
    "report": 1,
    "which": 1,
    "verify": 1,
    "pairs": 1,
    "backends": 1,
    "demo": 1,
    "doctor": 1,
    "calibrate": 1,
    "bench": 1,
    "layout": 1,  # a file: kvplan.dump writes it
    "finding": 1,
}


def print_json(name: str, document: Mapping[str, Any]) -> None:
    """Print one JSON object, its schema first."""
    print(json.dumps({"schema": f"kvplan.{name}/{SCHEMAS[name]}", **document}, indent=2))


def schema_of(name: str) -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of a command's document, from the folder ``schemas`` beside this file.

    Args:
        name: a key of :data:`SCHEMAS`.

    Raises:
        KVPlanError: no document of that name has a schema.

    >>> schema_of("plan")["title"]
    'kvplan.plan/1'
    """
    from importlib.resources import files

    found = files("kvplan.cli") / "schemas" / f"{name}.json"
    if name not in SCHEMAS or not found.is_file():
        raise KVPlanError(f"{name!r} has no schema; documents are {', '.join(SCHEMAS)}")
    content: dict[str, Any] = json.loads(found.read_text(encoding="utf-8"))
    return content


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
