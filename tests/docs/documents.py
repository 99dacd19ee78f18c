"""Every page of the manual."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]


DOCUMENTS = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), ROOT / "benchmarks" / "README.md"])
