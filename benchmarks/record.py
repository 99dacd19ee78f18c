"""Rows of measurements: printed as one table a group, saved as JSON."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import kvplan

SCHEMA = "kvplan.benchmark"
SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Row:
    """One measurement.

    Attributes:
        group: the table it stands in.
        what: the measurement in words.
        unit: of ``ours``, ``limit`` and ``beside``: ``"us"``, ``"ms"``, ``"GB/s"``, ``"MB"``, ``"x"`` (times as long).
        ours: kvplan's number.
        beside: floors, ceilings and baselines of the same run, by name; the limit is made of the first one.
        limit: the number that ours must not pass, or None where the row holds no limit.
        rule: the limit in words.
        more_is_better: whether ours must reach the limit instead.
        detail: further numbers.
    """

    group: str
    what: str
    unit: str
    ours: float
    beside: Mapping[str, float] = field(default_factory=dict)
    limit: float | None = None
    rule: str = ""
    more_is_better: bool = False
    detail: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ok(self) -> bool | None:
        """Whether the limit holds; None without a limit."""
        if self.limit is None:
            return None
        return self.ours >= self.limit if self.more_is_better else self.ours <= self.limit

    @property
    def ratios(self) -> dict[str, float]:
        """Ours over each floor, ceiling and baseline."""
        return {name: self.ours / value for name, value in self.beside.items() if value}


def machine() -> dict[str, Any]:
    """The machine as it is now."""
    return {
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "load": [round(load, 2) for load in os.getloadavg()],
        "system": platform.platform(),
    }


def cpu_model() -> str:
    """The processor's name, as Linux or Python knows it."""
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found[1].strip() if found else platform.processor() or platform.machine()


def versions() -> dict[str, str]:
    """Versions of Python, kvplan and its dependencies."""
    return {
        "python": platform.python_version(),
        "kvplan": kvplan.__version__,
        "numpy": version("numpy"),
        "numba": version("numba"),
    }


def commit(checkout: Path = Path(__file__).parents[1]) -> str:
    """The commit of a checkout, or what the variable ``KVPLAN_COMMIT`` says where there is no git.

    Files that differ from it add ``+``.
    """
    git = ["git", "-C", str(checkout), "describe", "--always", "--abbrev=8", "--exclude=*", "--dirty=+"]
    try:
        done = subprocess.run(git, capture_output=True, text=True, check=False)  # noqa: S603  # no word is a user's
    except OSError:
        return os.environ.get("KVPLAN_COMMIT", "")
    return done.stdout.strip() or os.environ.get("KVPLAN_COMMIT", "")


def document(rows: Sequence[Row], *, scale: Any | None, started: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON document of one run.

    Args:
        rows: the measurements.
        scale: sizes of the run, a dataclass, or None.
        started: :func:`machine` at its start; the load at its end is added.
    """
    return {
        "schema": SCHEMA,
        "version": SCHEMA_VERSION,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "machine": {**started, "load_after": machine()["load"]},
        "versions": versions(),
        "scale": asdict(scale) if scale else {},
        "rows": [{**_rounded(asdict(row)), "ratios": _rounded(row.ratios), "ok": row.ok} for row in rows],
    }


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.5g}")
    return {key: _rounded(item) for key, item in value.items()} if isinstance(value, dict) else value


def default_path() -> Path:
    """Where the result of this machine is kept."""
    slug = re.sub(r"[^a-z0-9]+", "-", cpu_model().lower().replace("(r)", "").replace("(tm)", "")).strip("-")
    return Path(__file__).parent / "results" / f"planning-{slug}.json"


def save(path: Path, made: Mapping[str, Any]) -> None:
    """Write a document."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(made, indent=1) + "\n")


def table(rows: Sequence[Row]) -> str:
    """Rows of one group as text: ours, the limit, then each floor or baseline and ours over it."""
    return "\n".join(_aligned(_cells(rows)))


def _cells(rows: Sequence[Row]) -> list[list[str]]:
    names = list(dict.fromkeys(name for row in rows for name in row.beside))
    head = [rows[0].group, "ours", "limit", "", *(cell for name in names for cell in (name, "ours/it")), "ok?"]
    body = []
    for row in rows:
        limit = "" if row.limit is None else number_with_unit(row.limit, row.unit)
        beside = []
        for name in names:
            value, ratio = row.beside.get(name), row.ratios.get(name)
            beside += [
                "" if value is None else number_with_unit(value, row.unit),
                "" if ratio is None else f"{ratio:.2f}",
            ]
        verdict = {None: "", True: "yes", False: "NO"}[row.ok]
        body.append([row.what, number_with_unit(row.ours, row.unit), limit, row.rule, *beside, verdict])
    return [head, *body]


def number_with_unit(value: float, unit: str) -> str:
    """Return a figure as tables show it.

    >>> number_with_unit(1234.5, "us"), number_with_unit(0.125, "x")
    ('1,234 us', '0.12 x')
    """
    digits = 2 if abs(value) < 10 else 1 if abs(value) < 100 else 0
    return f"{value:,.{digits}f} {unit}"


def _aligned(cells: Sequence[Sequence[str]]) -> list[str]:
    kept = [k for k in range(len(cells[0])) if any(row[k] for row in cells)]
    widths = {k: max(len(row[k]) for row in cells) for k in kept}
    left = {0, 3}  # text; the rest are numbers
    lines = []
    for row in cells:
        line = "  ".join(row[k].ljust(widths[k]) if k in left else row[k].rjust(widths[k]) for k in kept)
        lines.append(line.rstrip())
    return lines
