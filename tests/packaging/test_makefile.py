"""The Makefile: what a newcomer runs tells its downloads first, and takes the pinned torch for CPUs."""

from __future__ import annotations

import re
import subprocess
from shutil import which

import pytest

from tests.commands import ROOT

MAKEFILE = (ROOT / "Makefile").read_text()


def test_the_demo_tells_the_size_before_it_installs(tmp_path):
    if which("make") is None:
        pytest.skip("make is not installed")
    venv = tmp_path / "venv"
    planned = subprocess.run(
        ["make", "--dry-run", "demo", f"VENV={venv}"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    ).stdout
    told = planned.index("about 250 MB")
    assert told < planned.index("--group demo")
    assert told < planned.index("--index-url https://download.pytorch.org/whl/cpu torch==")


def test_torch_for_cpus_is_the_version_of_the_demo():
    project = (ROOT / "pyproject.toml").read_text()
    first = re.search(r"torch==[0-9.]*", project)
    assert f'demo = ["{first[0]}"' in project
    assert "grep -o -m 1 'torch==[0-9.]*' pyproject.toml" in MAKEFILE
