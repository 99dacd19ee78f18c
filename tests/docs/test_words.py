"""Words that a machine can check: messages, docstrings and sentences of the documents.

Each test prints ``file:line`` and the text. ``OPEN`` names what a file may still have; its numbers only go down.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
SOURCES = sorted(
    path for folder in ("kvplan", "backends") for path in (ROOT / folder).rglob("*.py")
    if not path.is_relative_to(ROOT / "kvplan" / "backends")  # a link to backends/
)  # fmt: skip
DOCUMENTS = sorted(
    [path for name in ("README", "CHANGELOG", "CONTRIBUTING", "SECURITY") if (path := ROOT / f"{name}.md").is_file()]
    + list((ROOT / "docs").rglob("*.md"))
)
MOST_WORDS = 30

# "path 'x' is none" does not say what would be right. "There is none" is plain English.
IS_NONE = re.compile(r"(?<!here )\b(?:is|are) none\b")
HEADLESS = re.compile(r"(?:What|Who|Whoever|Whose|So many|Those|None of|Nobody)\b")
# "Whether pinned." has no verb. Verbs are found by their endings, and a few by name.
VERBLESS = re.compile(r"Whether\b(?!.*\b(?:is|are|was|were|can|may|must|do|have|will|would|should|\w+(?:s|ed|t))\b)")

# Sentences that may be longer, by their first words, and why.
LONG: dict[str, str] = {}

# What is still to be mended: test, file, and how many places.
OPEN: dict[str, dict[str, int]] = {"none": {}, "docstring": {}, "sentence": {}}


class Place(NamedTuple):
    """A text, and where it stands."""

    path: Path
    line: int
    text: str


def strings(path: Path) -> Iterator[Place]:
    """Yield every string literal of a module; the fields of an f-string are left out."""
    pieces: set[ast.AST] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):  # an f-string comes before its pieces
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in pieces:
            yield Place(path, node.lineno, node.value)
        elif isinstance(node, ast.JoinedStr):
            pieces.update(node.values)
            parts = (part.value if isinstance(part, ast.Constant) else "_" for part in node.values)
            yield Place(path, node.lineno, "".join(parts))


def docstrings(path: Path) -> Iterator[Place]:
    """Yield the first paragraph of every docstring of a module."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield Place(path, node.body[0].lineno, " ".join(text.partition("\n\n")[0].split()))


def paragraphs(path: Path) -> Iterator[Place]:
    """Yield the prose of a document: no code, no tables, no headings, no comments."""
    text = re.sub(r"^( *)```.*?^\1```$|<!--.*?-->", lambda found: "\n" * found[0].count("\n"),
                  path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)  # fmt: skip
    held: list[str] = []
    first = 0
    for number, line in enumerate([*text.splitlines(), ""], 1):
        item = re.match(r"\s*(?:[-*+]|\d+\.)\s+", line)
        prose = bool(line.strip()) and not re.match(r"\s*[|#]| {4,}\S" if not held else r"\s*[|#]", line)
        if held and (item or not prose):
            yield Place(path, first, " ".join(held))
            held = []
        if prose:
            first = first if held else number
            held.append(line[item.end() :] if item else line.strip())


def sentences(path: Path) -> Iterator[Place]:
    """Yield the sentences of a document; a link counts by its words, a piece of code as one word."""
    for _, line, text in paragraphs(path):
        plain = re.sub(r"`[^`]*`", "CODE", re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text))
        for sentence in re.split(r"(?<=[.!?])(?<!e\.g\.)(?<!i\.e\.)[\"*_)]*\s+", plain):
            yield Place(path, line, sentence)


def words(text: str) -> int:
    return len(re.findall(r"\S*\w\S*", text))


def check(test: str, found: list[Place]) -> None:
    """Fail where a file has more places than ``OPEN`` allows."""
    by_file: dict[str, list[str]] = {}
    for path, line, text in found:
        name = str(path.relative_to(ROOT))
        by_file.setdefault(name, []).append(f"{name}:{line}: {' '.join(text.split())[:300]}")
    wrong = [line for name, lines in by_file.items() if len(lines) > OPEN[test].get(name, 0) for line in lines]
    assert not wrong, f"{len(wrong)} places:\n" + "\n".join(wrong)


def test_no_message_says_that_a_thing_is_none():
    found = [one for path in SOURCES for one in strings(path)] + [one for path in DOCUMENTS for one in sentences(path)]
    check("none", [one for one in found if IS_NONE.search(one.text)])


def test_no_docstring_starts_without_a_subject():
    found = (one for path in SOURCES for one in docstrings(path))
    check("docstring", [one for one in found if HEADLESS.match(one.text) or VERBLESS.match(one.text)])


def test_sentences_of_documents_are_short():
    found = (one for path in DOCUMENTS for one in sentences(path))
    check("sentence", [
        one._replace(text=f"{words(one.text)} words: {one.text}") for one in found
        if words(one.text) > MOST_WORDS and not one.text.startswith(tuple(LONG))
    ])  # fmt: skip


def test_every_long_sentence_that_is_named_is_there():
    texts = [one.text for path in DOCUMENTS for one in sentences(path) if words(one.text) > MOST_WORDS]
    assert not [start for start in LONG if not any(text.startswith(start) for text in texts)]
