"""Write pages of the reference from kvplan's own data: ``python docs/tools/reference_pages.py``.

``docs/reference/models.md`` lists the models and layouts of the catalogue, ``docs/reference/schemas.md`` the JSON schemas of the
command line. A test compares both with the data. The site's build adds :func:`options`, the help of every command.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from subprocess import run

from kvplan.catalogue.layouts import named_layouts
from kvplan.catalogue.models import Group, Model, models
from kvplan.cli.main import COMMANDS

FOLDER = Path(__file__).parents[1] / "reference"
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
    found = models().values()
    lines = ["# Models and layouts by name", "", NOTE, "",
             f"`kvplan inspect --model NAME` knows {len(found)} models, and takes the path of a `config.json`, too. "
             "[The command line](cli.md) explains the groups.", "",
             "| model | layers | cache of a layer, by group | source |", "| --- | --- | --- | --- |"]  # fmt: skip
    lines += [f"| `{one.name}` | {one.layers} | {_groups(one)} | {_cell(one.source)} |" for one in found]
    layouts = named_layouts().values()
    lines += ["", "## Layouts", "",
              f"`kvplan pairs --device NAME --host NAME` and `inspect --engine NAME --host NAME` know {len(layouts)} layouts. "
              "[Every pair](pairs.md) is compiled on a page of its own.", "",
              "| layout | side | kind | notation | source |", "| --- | --- | --- | --- | --- |"]  # fmt: skip
    lines += [f"| `{one.name}` | {one.side} | {one.kind} | `{one.notation}` | {_cell(one.source)} |" for one in layouts]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def schemas() -> Iterator[tuple[str, dict[str, object]]]:
    """Yield the name and the content of each schema."""
    for file in sorted(files("kvplan.cli.schemas").iterdir(), key=lambda one: one.name):
        if file.name.endswith(".json"):
            yield file.name, json.loads(file.read_text(encoding="utf-8"))


def schemas_page() -> str:
    """Return the page of the JSON schemas."""
    lines = ["# JSON schemas", "", NOTE, "",
             "All commands take `--json`. The documents are held to these schemas by tests. A field keeps its meaning within a version; "
             "new fields may appear.", "",
             "| document | content | schema |", "| --- | --- | --- |"]  # fmt: skip
    for name, schema in schemas():
        title, words = schema.get("title", name), _cell(str(schema.get("description", "")))
        lines.append(f"| `{title}` | {words} | [{name}](../../kvplan/cli/schemas/{name}) |")
    return "\n".join(lines) + "\n"


def options() -> str:
    """Return the page of every command's own help."""
    lines = ["# Options of every command", "", "The text is each command's own help: `kvplan COMMAND --help`.", ""]
    for name in COMMANDS:
        shown = run([sys.executable, "-m", "kvplan", name, "--help"], capture_output=True, text=True, check=True,
                    env=os.environ | {"COLUMNS": "100"}, timeout=60)  # fmt: skip
        lines += [f"## kvplan {name}", "", "```text", shown.stdout.rstrip(), "```", ""]
    return "\n".join(lines)


PAGES = {"models.md": models_page, "schemas.md": schemas_page}


def main() -> None:
    """Write both pages."""
    for name, page in PAGES.items():
        (FOLDER / name).write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
