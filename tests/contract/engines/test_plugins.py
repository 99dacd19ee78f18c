"""The entry points of the plugins: cheap in a process whose variables ask for nothing, and else the plugin itself."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
POINTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
BOTH = {"kvplan-lmcache": "KVPLAN_LMCACHE", "kvplan-nixl": "KVPLAN_NIXL"}
VARIABLES = {"vllm.general_plugins": BOTH, "sglang.srt.plugins": BOTH | {"kvplan": "KVPLAN_SGLANG"}}
EVERY = [(group, name) for group, names in VARIABLES.items() for name in names]
LIGHT = {"kvplan", "kvplan.base", "kvplan.engines", "kvplan.engines.plugins", "kvplan.errors"}
PROBE = """
import sys
from importlib.metadata import EntryPoint
EntryPoint(sys.argv[2], sys.argv[3], sys.argv[1]).load()()
print(*(name for name in sys.modules if name.partition(".")[0] in {"kvplan", "numba", "numpy", "torch", "triton"}))
"""


def test_the_plugins_are_announced_to_vllm_and_sglang():
    assert {group: set(points) for group, points in POINTS.items()} == {
        group: set(names) for group, names in VARIABLES.items()
    }


@pytest.mark.parametrize("value", [None, "", "0"])
@pytest.mark.parametrize(("group", "name"), EVERY)
def test_a_plugin_that_nobody_asks_for_imports_almost_nothing(group, name, value):
    environment = {name: held for name, held in os.environ.items() if not name.startswith("KVPLAN_")}
    environment |= {} if value is None else {VARIABLES[group][name]: value}
    done = subprocess.run(
        [sys.executable, "-c", PROBE, group, name, POINTS[group][name]], capture_output=True, text=True, check=True,
        env={**environment, "PYTHONPATH": str(ROOT)}, timeout=120,
    )  # fmt: skip
    assert set(done.stdout.split()) == LIGHT
