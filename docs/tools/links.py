"""Hooks of the documentation site: pages from the top of the repository, links to files outside ``docs/``, fences.

The pages are written for a reader of the repository. The site has no repository around it. So a file that a page links
to is copied into the site, and the link is changed to lead there.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

from docs.tools.reference_pages import options
from kvplan.base import __version__

ROOT = Path(__file__).parents[2]
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "benchmarks/README.md": "benchmarks.md",
}
OPTIONS = "reference/options.md"  # made of the commands' own help when the site is built
LINK = re.compile(r"\]\((?![a-z]+:)([^)#\s]+)")
FENCE = re.compile(r"^( *```\w+) .*$", re.MULTILINE)  # the words behind the language are for the tests of examples
CODE = re.compile(r"<(pre|code|script)\b.*?</\1>", re.DOTALL)


def on_config(config: Any) -> Any:
    """Say the version in the header."""
    config.site_name = f"kvplan {__version__}"
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the other pages, and every file of the repository that a page links to."""
    for source, uri in PAGES.items():
        files.append(File.generated(config, uri, content=(ROOT / source).read_text(encoding="utf-8")))
    files.append(File.generated(config, OPTIONS, content=options()))
    for file in list(files.documentation_pages()):
        for target in LINK.findall(file.content_string):
            path = _path(file.src_uri, target)
            uri = _uri(path)
            if (ROOT / path).is_file() and uri not in files.src_uris:
                files.append(File.generated(config, uri, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The page with links that hold in the site."""
    here = page.file.src_uri

    def changed(match: re.Match[str]) -> str:
        path = _path(here, match[1])
        if not (ROOT / path).exists():
            return match[0]  # not a link of ours, or a broken one, which the build reports
        uri = "evidence/architecture.md" if (ROOT / path).is_dir() else _uri(path)
        return f"]({posixpath.relpath(uri, posixpath.dirname(here))}"

    return FENCE.sub(r"\1", LINK.sub(changed, markdown))


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """The page, whose code is shown as code."""
    if "```" in CODE.sub("", output):
        raise PluginError(f"{page.file.src_uri} shows a fence as text")
    return output


def _path(uri: str, target: str) -> str:
    """The path in the repository that a link of a page means; the page is named by its place in the site."""
    source = next((source for source, page in PAGES.items() if page == uri), f"docs/{uri}")
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), target))


def _uri(path: str) -> str:
    """Where a file of the repository stands in the site."""
    return PAGES.get(path) or (
        path.removeprefix("docs/") if path.startswith("docs/") else f"repository/{path.lstrip('.')}"
    )
