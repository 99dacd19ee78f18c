"""Rows of measurements: printed as one table a group, saved as JSON."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from math import inf
from pathlib import Path
from typing import Any

import kvplan

SCHEMA, SCHEMA_VERSION = "kvplan.benchmark", 2
RESULTS = Path(__file__).parent / "results"
TOLERANCE = 1.03  # a figure further above the link was not measured right


@dataclass(frozen=True)
class Row:
    """One measurement.

    Attributes:
        group: the table it stands in.
        what: the measurement in words.
        unit: of ``ours`` and ``beside``: ``"us"``, ``"ms"``, ``"GB/s"``, ``"x"`` (times as long).
        ours: kvplan's number.
        beside: ceilings and baselines of the same run, by name.
        more_is_better: whether a larger number is better.
        detail: further numbers; ``"broken"`` says why the figure is wrong.
    """

    group: str
    what: str
    unit: str
    ours: float
    beside: Mapping[str, float] = field(default_factory=dict)
    more_is_better: bool = False
    detail: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ratios(self) -> dict[str, float]:
        """Ours over each ceiling and baseline."""
        return {name: self.ours / value for name, value in self.beside.items() if value}

    @property
    def broken(self) -> str:
        """Why the figure is wrong, or ""."""
        return str(self.detail.get("broken", ""))


def speed_row(
    group: str, what: str, gbps: float, beside: Mapping[str, float], *, link: float = inf,
    detail: Mapping[str, Any] | None = None,
) -> Row:  # fmt: skip
    """Return a row of GB/s; it is broken if ours or a baseline is above the link.

    >>> speed_row("staged", "load", 60.0, {}, link=55.0).broken
    "60.0 GB/s is above the link's 55.0"
    """
    kept, fastest = dict(detail or {}), max(gbps, *beside.values(), 0.0)
    if fastest > TOLERANCE * link:
        kept["broken"] = f"{fastest:.1f} GB/s is above the link's {link:.1f}"
    return Row(group, what, "GB/s", gbps, beside, more_is_better=True, detail=kept)


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


def versions(packages: Iterable[str] = ()) -> dict[str, str]:
    """Versions of Python and kvplan, of its dependencies, and of those packages that are installed."""
    found = {"python": platform.python_version(), "kvplan": kvplan.__version__}
    for package in ("numpy", "numba", *packages):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def commit(checkout: Path = Path(__file__).parents[1]) -> str:
    """The commit of a checkout, or what the variable ``KVPLAN_COMMIT`` says where there is no git.

    Files that differ from it add ``+``.
    """
    git = ["git", "-C", str(checkout), "describe", "--always", "--abbrev=8", "--exclude=*", "--dirty=+"]
    try:
        done = subprocess.run(git, capture_output=True, text=True, check=False)  # no word is a user's
    except OSError:
        return os.environ.get("KVPLAN_COMMIT", "")
    return done.stdout.strip() or os.environ.get("KVPLAN_COMMIT", "")


def document(
    rows: Sequence[Row], *, started: Mapping[str, Any], scale: Any = None, packages: Iterable[str] = (), **more: Any
) -> dict[str, Any]:
    """The JSON document of one run.

    Args:
        rows: the measurements.
        started: :func:`machine` at its start, and further facts of it; the load at its end is added.
        scale: sizes of the run, a dataclass, or None.
        packages: packages whose versions count.
        more: further entries.
    """
    return {
        "schema": SCHEMA,
        "version": SCHEMA_VERSION,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "machine": {**started, "load_after": machine()["load"]},
        "versions": versions(packages),
        "scale": asdict(scale) if scale else {},
        "rows": [_rounded({**asdict(row), "ratios": row.ratios}) for row in rows],
        **more,
    }


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.5g}")
    return {key: _rounded(item) for key, item in value.items()} if isinstance(value, dict) else value


def default_path(topic: str, name: str, *groups: str) -> Path:
    """The file of a run's result; a run of some groups has a file of its own, so that it replaces no whole run.

    >>> default_path("gpu", "NVIDIA H200", "peer").name
    'gpu-nvidia-h200-peer.json'
    """
    plain = name.lower().replace("(r)", "").replace("(tm)", "")
    return RESULTS / f"{'-'.join([topic, re.sub(r'[^a-z0-9]+', '-', plain).strip('-'), *groups])}.json"


def save(path: Path, made: Mapping[str, Any]) -> None:
    """Write a document."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(made, indent=1) + "\n")


def table(rows: Sequence[Row]) -> str:
    """Rows as text, a table a group: ours, then each ceiling or baseline and ours over it."""
    groups = dict.fromkeys(row.group for row in rows)
    return "\n\n".join("\n".join(_aligned([row for row in rows if row.group == group])) for group in groups)


def _aligned(rows: Sequence[Row]) -> list[str]:
    names = list(dict.fromkeys(name for row in rows for name in row.beside))
    lines = [[rows[0].group, "ours", *(cell for name in names for cell in (name, "ours/it")), ""]]
    for row in rows:
        cells = [row.what, number_with_unit(row.ours, row.unit)]
        for name in names:
            known, ratio = name in row.beside, row.ratios.get(name)
            cells.append(number_with_unit(row.beside[name], row.unit) if known else "")
            cells.append("" if ratio is None else f"{ratio:.2f}")
        lines.append([*cells, "BROKEN" if row.broken else ""])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]).rstrip()
        for line in lines
    ]  # fmt: skip


def number_with_unit(value: float, unit: str) -> str:
    """Return a figure as tables show it.

    >>> number_with_unit(1234.5, "us"), number_with_unit(0.125, "x")
    ('1,234 us', '0.12 x')
    """
    digits = 2 if abs(value) < 10 else 1 if abs(value) < 100 else 0
    return f"{value:,.{digits}f} {unit}"
