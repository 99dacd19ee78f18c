"""Adapters say which versions they were held against, and check the one that runs."""

from __future__ import annotations

import re
import sys
from types import ModuleType

import pytest

from kvplan import KVPlanError
from kvplan.engines import vllm
from kvplan.engines.versions import SGLANG, TRANSFORMERS, VLLM, check


@pytest.mark.parametrize(("held", "running", "verdict"), [
    (VLLM, "0.33.7", "held"), (VLLM, "0.34.0", "refused"), (VLLM, "dev", "refused"), (SGLANG, "0.5.24", "unknown"),
    (SGLANG, "0.5.23.post1", "held"), (TRANSFORMERS, "5.17.0", "refused"), (TRANSFORMERS, "4.57.1", "refused"),
    (TRANSFORMERS, "5.20.0", "unknown"), (TRANSFORMERS, "5.24.0.dev0", "unknown"),
])  # fmt: skip
def test_verdicts(held, running, verdict, caplog):
    if verdict == "refused":
        with pytest.raises(KVPlanError, match=re.escape(running)):
            check(held, running)
        return
    for _ in range(2):  # an unknown version is logged once
        check(held, running)
    assert caplog.text.count(running) == (verdict == "unknown")


def test_another_vllm_is_refused_before_anything_of_it_is_imported(monkeypatch):
    engine = ModuleType("vllm")
    engine.__version__ = "0.32.0"
    monkeypatch.setitem(sys.modules, "vllm", engine)
    for name in vllm.NAMES:
        with pytest.raises(KVPlanError, match=r"vLLM 0\.32\.0 may differ.*held against vLLM 0\.33\.0: install vllm=="):
            getattr(vllm, name)
