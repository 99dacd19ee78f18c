"""Print JSON documents, and read their schemas from ``kvplan/cli/schemas``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from kvplan.errors import KVPlanError

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
