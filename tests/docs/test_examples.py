"""The examples run as a reader would run them, where there is no GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import PATIENCE

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


def printed(example, *options):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, f"examples/{example}", *map(str, options)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_layers_arrive_while_others_are_computed(tmp_path):
    pytest.importorskip("torch", reason="the example computes with torch")
    kept = tmp_path / "layerwise.json"
    options = ("--device", "cpu", "--prefix", 100, "--times", 2, "--json", kept)
    assert "results equal" in printed("layerwise_load.py", *options)
    result = json.loads(kept.read_text())
    assert result["equal"]
    assert result["nbytes"] == 7 * 16 * 4 * 2 * 2 * 16 * 4  # blocks, tokens, layers, K and V, heads, dim, bytes
    assert list(result["first_token_s"]) == ["load, then compute", "layer by layer"]


def test_prefill_in_one_process_and_decode_in_another():
    pytest.importorskip("transformers", reason="the example runs a model of transformers")
    text = printed("prefill_decode.py", "--devices", "cpu", "cpu", "--prompts", 3, "--new", 8)
    assert "tokens first, by shm" in text
    assert "tokens equal" in text
