"""The documentation site: its reference has every public name, and its hooks write what Markdown reads."""

from __future__ import annotations

import pkgutil
import re

import pytest

import kvplan
import kvplan.backends
from docs.tools import reference_pages
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


def test_every_page_is_in_the_navigation():
    shown = set(re.findall(r"^ *- (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE))
    docs = ROOT / "docs"
    assert {str(page.relative_to(docs)) for page in docs.rglob("*.md")} <= shown


@pytest.mark.parametrize("link", re.findall(r"\]\((?!https?:)([^)#]+)\)", "".join(page.read_text() for page in PAGES)))
def test_a_link_of_the_reference_leads_somewhere(link):
    assert (ROOT / "docs" / "reference" / link).exists()


def test_a_docstring_becomes_markdown():
    docstrings = pytest.importorskip("docs.tools.docstrings", reason="the site's packages are not installed")
    text = "See :class:`~kvplan.KVLayout` and :func:`join`.\n\nArgs:\n    a, b: two\n        lines.\n\n>>> 1 + 1\n2\n\n"
    text += "=== ===\nx   y\n=== ===\n1   2\n=== ===\n"
    given = docstrings.markdown(text, "kvplan.plan.{}".format)
    assert '<autoref optional identifier="kvplan.KVLayout"><code>KVLayout</code></autoref>' in given
    assert '<autoref optional identifier="kvplan.plan.join"><code>join</code></autoref>' in given
    assert "    a: two\n        lines.\n    b: two\n        lines.\n" in given
    assert "```pycon\n>>> 1 + 1\n2\n```" in given
    assert "| x | y |\n| --- | --- |\n| 1 | 2 |" in given


def test_links_of_the_repository_lead_into_the_site():
    links = pytest.importorskip("docs.tools.links", reason="the site's packages are not installed")
    assert links._uri(links._path("gpu.md", "../benchmarks/README.md")) == "benchmarks.md"
    assert links._uri(links._path("contributing.md", "docs/guides/gpu.md")) == "guides/gpu.md"
    assert links._uri(links._path("architecture.md", "../.importlinter")) == "repository/importlinter"


def test_pages_of_the_catalogue_and_of_the_schemas_are_made_anew():
    for name, page in reference_pages.PAGES.items():
        given = (ROOT / "docs" / "reference" / name).read_text(encoding="utf-8")
        assert given == page(), "run: python docs/tools/reference_pages.py"


def test_the_page_of_options_has_the_help_of_every_command(monkeypatch):
    monkeypatch.setattr(reference_pages, "COMMANDS", {"plan": "", "which": ""})
    page = reference_pages.options()
    assert page.count("usage: kvplan plan") == page.count("usage: kvplan which") == 1
    assert "--src" in page
