"""The reference has every public name, and the page about GPUs says what the policy says."""

from __future__ import annotations

import pkgutil
import re

import kvplan
import kvplan.backends
from kvplan.base.numbers import rounded
from kvplan.cost.policy import BESIDE_KERNELS, IDLE_KERNELS, ROUTES, KernelSize
from tests.commands import ROOT

PAGES = sorted((ROOT / "docs" / "reference").glob("*.md"))
DIRECTIVES = [
    name for page in PAGES for name in re.findall(r"^::: (\S+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
]


def test_the_reference_has_every_public_name_once():
    public = {f"kvplan.{name}" for name in kvplan.__all__ if name != "__version__"}
    assert public <= set(DIRECTIVES)
    assert len(DIRECTIVES) == len(set(DIRECTIVES))


def test_the_reference_has_every_backend():
    public = {name for _, name, _ in pkgutil.iter_modules(kvplan.backends.__path__) if not name.startswith("_")}
    assert {name.rpartition(".")[2] for name in DIRECTIVES if name.startswith("kvplan.backends.")} == public


def told(size: KernelSize) -> str:
    programs = f"{size.programs}" if size.programs > 0 else f"{max(-size.programs, 1)} per SM"
    return f"{programs}, {rounded(size.tile)}, {size.warps}"


def test_the_table_of_kernel_sizes_is_the_policy_s():
    rows = ["| route | without compute | beside compute |", "| --- | --- | --- |"]
    rows += [f"| {route} | {told(IDLE_KERNELS[route])} | {told(BESIDE_KERNELS[route])} |" for route in ROUTES]
    text = (ROOT / "docs" / "guides" / "gpu.md").read_text(encoding="utf-8")
    shown = re.search(r"<!-- kernel sizes -->\n(.*?)\n<!-- end of kernel sizes -->", text, re.DOTALL)
    assert shown[1].splitlines() == rows
