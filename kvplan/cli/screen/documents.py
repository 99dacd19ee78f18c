"""Print JSON documents, read their schemas from ``kvplan/cli/schemas``, and write files."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from kvplan.base.files import write_whole
from kvplan.errors import KVPlanError

# Version of each command's JSON document. It rises if a key is removed or changes its meaning, not for a new key.
SCHEMAS = {
    "inspect": 1,
    "inspect-model": 1,
    "models": 1,
    "plan": 1,
    "diff": 1,
    "advise": 1,
    "explain": 1,
    "report": 1,
    "which": 1,
    "pairs": 1,
    "backends": 1,
    "demo": 1,
    "doctor": 2,
    "calibrate": 2,
    "calibrate-wire": 2,
    "bench": 1,
    "layout": 1,  # a file: kvplan.dump writes it
    "finding": 1,
}


def print_json(name: str, document: Mapping[str, Any]) -> None:
    """Print a document."""
    print(json_text(name, document))


def json_text(name: str, document: Mapping[str, Any]) -> str:
    """Return a document as one JSON object, its schema first."""
    return json.dumps({"schema": f"kvplan.{name}/{SCHEMAS[name]}", **document}, indent=2)


def schema_of(name: str) -> dict[str, Any]:
    """Read the JSON Schema (draft 2020-12) of a command's document.

    Args:
        name: a key of :data:`SCHEMAS`.

    Raises:
        KVPlanError: there is no document of that name.

    >>> schema_of("plan")["title"]
    'kvplan.plan/1'
    """
    from importlib.resources import files

    if name not in SCHEMAS:
        raise KVPlanError(f"{name!r} has no schema; documents are {', '.join(SCHEMAS)}")
    folder = files("kvplan.cli") / "schemas"
    found = (folder / "calibration" if name.startswith("calibrate") else folder) / f"{name}.json"
    content: dict[str, Any] = json.loads(found.read_text(encoding="utf-8"))
    return content


def write_file(option: str, name: str, content: bytes) -> None:
    """Write a file completely or not at all, so that no reader sees half of it.

    Raises:
        KVPlanError: it cannot be written.
    """
    try:
        write_whole(Path(name), content)
    except (OSError, ValueError) as error:
        raise _unwritable(option, name, error) from None


def check_file(option: str, name: str, *, folder: bool = False) -> None:
    """Check that a file can be written, before a command works and prints.

    Args:
        option: the option that names the file.
        name: the file.
        folder: whether to make its folder if it is missing.

    Raises:
        KVPlanError: it cannot be written; the message is that of :func:`write_file`.
    """
    try:
        path = Path(os.path.realpath(name))
        if folder:
            path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir() or not path.name:
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), name)
        if not path.exists() or path.is_file():  # pipes and devices are written directly
            with TemporaryFile(dir=path.parent):  # as the new content is: in the folder of the file
                pass
    except (OSError, ValueError) as error:
        raise _unwritable(option, name, error) from None


def _unwritable(option: str, name: str, error: OSError | ValueError) -> KVPlanError:
    why = getattr(error, "strerror", "") or error
    return KVPlanError(f"{option} {name!r} cannot be written: {why}")
