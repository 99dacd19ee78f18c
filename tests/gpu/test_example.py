"""The example of two processes and a model: prefill on one GPU, decode on the same one or on another."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from tests.commands import ROOT

PATIENCE = 300.0  # seconds
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.parametrize(
        "decode",
        ["cuda:0", pytest.param("cuda:1", marks=pytest.mark.skipif(
            torch.cuda.device_count() < 2, reason="fewer than two CUDA devices"))],
    ),
]  # fmt: skip


def test_tokens_are_those_of_one_process(decode):
    pytest.importorskip("transformers", reason="the example runs a model of transformers")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "examples/prefill_decode.py", "--devices", "cuda:0", decode]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
                          timeout=PATIENCE)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "by cuda_ipc" in done.stdout
    assert "tokens equal" in done.stdout
