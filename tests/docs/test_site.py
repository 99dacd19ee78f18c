"""The documentation site: its reference has every public name, and its hooks write what Markdown reads."""

from __future__ import annotations

import pkgutil
import re

import pytest

import kvplan
import kvplan.backends
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


@pytest.mark.parametrize("link", re.findall(r"\]\((?!https?:)([^)#]+)\)", "".join(page.read_text() for page in PAGES)))
def test_a_link_of_the_reference_leads_somewhere(link):
    assert (ROOT / "docs" / "reference" / link).exists()
