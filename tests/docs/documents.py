"""Every page of the manual."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]


DOCUMENTS = sorted(
    [
        ROOT / "README.md",
        *(ROOT / "docs").glob("*.md"),
        *(ROOT / "docs" / "processes").glob("*.md"),
        ROOT / "benchmarks" / "README.md",
    ]
)
