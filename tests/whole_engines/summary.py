"""The summary of a run as a JSON file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.gpu import environment
from benchmarks.record import machine, versions

SCHEMA, VERSION = "kvplan.engines", 1
COMMAND = "make test-gpu-engines"


def write(path: Path, columns: Sequence[str], rows: Mapping[str, Sequence[str]], failed: Sequence[str]) -> None:
    """Write the rows of a summary, the names of tests that failed, the machine and the versions."""
    import torch

    made = {
        "schema": SCHEMA, "version": VERSION, "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": COMMAND, "machine": machine(), "gpu": environment.gpu() if torch.cuda.is_available() else {},
        "versions": versions() | environment.versions(("vllm", "torch", "triton", "transformers")),
        "rows": [{"case": name, **dict(zip(columns, cells, strict=True))} for name, cells in sorted(rows.items())],
        "failed": sorted(failed),
    }  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(made, indent=1) + "\n")
