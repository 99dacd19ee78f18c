"""What a real GPU and its link are, and that the doctor looks at them and stays on its feet."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvplan.cuda.machine import machine
from kvplan.measure.doctor import _woken, examine, gather

pytestmark = pytest.mark.gpu


def test_a_real_gpu_and_its_doctor():
    found = machine(0)
    assert found.gpu == torch.cuda.get_device_name(0)
    assert found.cuda >= 12000
    assert found.driver
    assert found.link.generation in range(1, 8)  # lowered where the GPU idles
    assert found.link.key[0] in range(3, 8)
    assert found.link.width in {1, 2, 4, 8, 16}

    facts = gather("cuda:0", busy=True)
    assert "busy" not in facts.missing
    assert facts.machine is not None
    assert facts.machine.link.generation in range(3, 8)  # awake, or woken
    assert facts.machine.link.key == found.link.key
    for _ in range(2):  # also where the link never sleeps
        assert _woken(0, Path("/")).link.key == found.link.key
    states = {finding.name: finding.state for finding in examine(facts)}
    assert (states["driver"], states["GPU"], states["torch"], states["Triton"]) == ("ok",) * 4
    assert states["batch copies"] == ("ok" if facts.batch else "warning")
    assert examine(gather("cuda:99"))[1].state == "problem"
