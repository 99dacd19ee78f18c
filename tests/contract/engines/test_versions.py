"""Adapters say which versions they were held against, and check the one that runs."""

from __future__ import annotations

import os
import subprocess
import sys
from types import ModuleType

import pytest

from kvplan import KVPlanError
from kvplan.engines import vllm
from kvplan.engines.versions import SGLANG, TRANSFORMERS, VLLM
from tests.commands import ROOT


@pytest.mark.parametrize(("held", "running", "verdict"), [
    (VLLM, "0.33.7", "held"), (VLLM, "0.34.0", "refused"), (VLLM, "dev", "refused"), (SGLANG, "0.5.24", "unknown"),
    (SGLANG, "0.5.23.post1", "held"), (TRANSFORMERS, "5.17.0", "refused"), (TRANSFORMERS, "4.57.1", "refused"),
    (TRANSFORMERS, "5.20.0", "unknown"), (TRANSFORMERS, "5.24.0.dev0", "unknown"),
])  # fmt: skip
def test_verdicts(held, running, verdict):
    found, why = held.judged(running)
    assert found == verdict
    assert (running in why) == (verdict != "held")


def test_another_vllm_is_refused_before_anything_of_it_is_imported(monkeypatch):
    engine = ModuleType("vllm")
    engine.__version__ = "0.32.0"
    monkeypatch.setitem(sys.modules, "vllm", engine)
    for name in vllm.NAMES:
        with pytest.raises(KVPlanError, match=r"vLLM 0\.32\.0 may differ.*held against vLLM 0\.33\.0: install vllm=="):
            getattr(vllm, name)


def test_the_example_says_which_transformers_it_needs(tmp_path):
    pytest.importorskip("transformers")
    text = (ROOT / "examples" / "transformers_offload.py").read_text(encoding="utf-8")
    assert "It needs transformers 5.21 or newer" in text
    code = (
        "import sys, runpy, transformers\n"
        "transformers.__version__ = '5.17.0'\n"
        "sys.argv = ['transformers_offload.py']\n"
        f"runpy.run_path({str(ROOT / 'examples' / 'transformers_offload.py')!r}, run_name='__main__')\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert run.returncode == 2
    assert (
        "transformers 5.17.0 is installed; this example needs 5.21 or newer: pip install transformers==5." in run.stderr
    )
    assert "Traceback" not in run.stderr
