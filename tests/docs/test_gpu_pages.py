"""The pages about GPUs say what the policy says."""

from __future__ import annotations

import re

from kvplan.base.numbers import rounded
from kvplan.cost.policy import BESIDE_KERNELS, IDLE_KERNELS, ROUTES, KernelSize
from tests.commands import ROOT


def told(size: KernelSize) -> str:
    programs = f"{size.programs}" if size.programs > 0 else f"{max(-size.programs, 1)} per SM"
    return f"{programs}, {rounded(size.tile)}, {size.warps}"


def test_the_table_of_kernel_sizes_is_the_policy_s():
    rows = ["| route | without compute | beside compute |", "| --- | --- | --- |"]
    rows += [f"| {route} | {told(IDLE_KERNELS[route])} | {told(BESIDE_KERNELS[route])} |" for route in ROUTES]
    text = (ROOT / "docs" / "guides" / "gpu.md").read_text(encoding="utf-8")
    shown = re.search(r"<!-- kernel sizes -->\n(.*?)\n<!-- end of kernel sizes -->", text, re.DOTALL)
    assert shown[1].splitlines() == rows
