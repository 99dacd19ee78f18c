"""What is prepared: the first transfers compile nothing; and an engine starts whatever is refused."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kvplan.engines.shared import prepare
from tests.commands import ROOT
from tests.contract.gpu.caches import way
from tests.contract.gpu.machines import Simulated
from tests.patience import PATIENCE


def test_an_engine_starts_whatever_is_refused(caplog):
    with Simulated() as gpu:
        refused, taken = (way(gpu, route).program for route in ("pageable load", "load"))
        prepare(gpu.executor("staged"), [refused, taken])
    assert "or the first one will wait: HostMemoryError: path 'staged' reaches" in caplog.text


@pytest.mark.slow
def test_loops_that_were_loaded_are_compiled_for_all_that_comes():
    command = [sys.executable, "-m", "tests.execute.loaded_loops"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "compiled: nothing\n"
