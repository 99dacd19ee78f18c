"""Write pages of the reference from kvplan's own data: ``python docs/tools/reference_pages.py``.

``docs/reference/models.md`` lists the models and layouts of the catalogue, ``docs/reference/schemas.md`` the JSON
schemas of the command line. A test compares both with the data. The site's build
adds :func:`options`, the help of every command.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from unittest.mock import patch

from kvplan.catalogue.layouts import named_layouts
from kvplan.catalogue.models import Group, Model, models
from kvplan.cli.main import COMMANDS
from kvplan.cli.main import main as main_of_kvplan

FOLDER = Path(__file__).parents[1] / "reference"
SCHEMAS = Path(__file__).parents[2] / "kvplan" / "cli" / "schemas"
NOTE = "<!-- made by: python docs/tools/reference_pages.py -->"


def _groups(model: Model) -> str:
    return "; ".join(_group(group) for group in model.groups)


def _group(group: Group) -> str:
    shape = f"{group.heads} heads x {group.dim}" if group.kind == "mha" else f"rows of {group.dim}"
    words = [f"{group.kind}, {shape}", f"{len(group.layers)} layers"]
    if group.window is not None:
        words.append(f"window {group.window:,}")
    return f"{group.name}: {', '.join(words)}"


def models_page() -> str:
    """Return the page of models and layouts."""
    found, layouts = models().values(), named_layouts().values()
    first = (
        f"`kvplan inspect --model NAME` knows {len(found)} models, and takes the path of a `config.json`, too. "
        "[The command line](cli.md) explains the groups."
    )
    second = (
        f"`kvplan pairs --device NAME --host NAME` and `inspect --engine NAME --host NAME` know {len(layouts)} "
        "layouts. [Every pair](pairs.md) is compiled on a page of its own."
    )
    return "\n".join([
        "# Models and layouts by name", "", NOTE, "", first, "",
        "| model | layers | cache of a layer, by group | source |", "| --- | --- | --- | --- |",
        *(f"| `{one.name}` | {one.layers} | {_groups(one)} | {_cell(one.source)} |" for one in found),
        "", "## Layouts", "", second, "",
        "| layout | side | kind | notation | source |", "| --- | --- | --- | --- | --- |",
        *(f"| `{one.name}` | {one.side} | {one.kind} | `{one.notation}` | {_cell(one.source)} |" for one in layouts),
        "",
    ])  # fmt: skip


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def schemas() -> Iterator[tuple[str, dict[str, object]]]:
    """Yield the name and the content of each schema."""
    for file in sorted(SCHEMAS.rglob("*.json"), key=lambda one: one.name):
        yield str(file.relative_to(SCHEMAS)), json.loads(file.read_text(encoding="utf-8"))


def schemas_page() -> str:
    """Return the page of the JSON schemas."""
    first = (
        "All commands take `--json`. Tests hold the documents to these schemas. A field keeps its meaning within a "
        "version; new fields may appear."
    )
    lines = ["# JSON schemas", "", NOTE, "", first, "", "| document | content | schema |", "| --- | --- | --- |"]
    for name, schema in schemas():
        title, words = schema.get("title", name), _cell(str(schema.get("description", "")))
        lines.append(f"| `{title}` | {words} | [{name}](../../kvplan/cli/schemas/{name}) |")
    return "\n".join(lines) + "\n"


def options() -> str:
    """Return the page of every command's own help."""
    lines = ["# Options of every command", "", "The text is each command's own help: `kvplan COMMAND --help`.", ""]
    for name in COMMANDS:
        shown = StringIO()
        with redirect_stdout(shown), patch.dict(os.environ, {"COLUMNS": "100"}):
            main_of_kvplan([name, "--help"])
        lines += [f"## kvplan {name}", "", "```text", shown.getvalue().rstrip(), "```", ""]
    return "\n".join(lines)


PAGES = {"models.md": models_page, "schemas.md": schemas_page}


def main() -> None:
    """Write both pages."""
    for name, page in PAGES.items():
        (FOLDER / name).write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
