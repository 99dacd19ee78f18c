"""The example of docs/guides/gpu.md runs as it stands."""

from __future__ import annotations

import re

import pytest
import torch

import kvplan
from tests.commands import ROOT

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices"),
]


@pytest.mark.parametrize("gpu", [0, 1])
def test_the_example_runs_on_either_gpu(gpu):
    text = (ROOT / "docs" / "guides" / "gpu.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"^```python gpu\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert 'kvplan.Executor("cuda:1")' in example
    given = example.replace('kvplan.Executor("cuda:1")', f'kvplan.Executor("cuda:{gpu}")')
    exec(compile(given, "docs/guides/gpu.md", "exec"), {"kvplan": kvplan})
