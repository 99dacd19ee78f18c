"""Tests are ordered as tests/README.md says: only helpers are imported, laws are listed, folders are small."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
FILES = sorted(TESTS.rglob("*.py"))
LAWS = sorted((TESTS / "laws").glob("test_*.py"))
TEST = re.compile(r"^tests\.(\w+\.)*test_")


def imported(path: Path) -> set[str]:
    """Every module that a file imports, in functions too; of `from a import b`, both a and a.b."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module or "", *(f"{node.module}.{name.name}" for name in node.names)}
    return found


def laws() -> dict[str, ast.FunctionDef]:
    """The tests of tests/laws, by file and name."""
    return {
        f"{path.stem}::{node.name}": node
        for path in LAWS
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def test_no_file_imports_a_test_module():
    """What two test modules share is a helper module, or a fixture."""
    found = {str(path.relative_to(TESTS)): {name for name in imported(path) if TEST.search(name)} for path in FILES}
    assert {path: names for path, names in found.items() if names} == {}


def test_a_folder_holds_twenty_files():
    folders = {path.parent for path in FILES}
    full = {str(folder.relative_to(ROOT)): len(list(folder.glob("*.py"))) for folder in folders}
    assert {name: count for name, count in full.items() if count > 20} == {}


def test_every_law_names_its_number():
    assert [name for name, node in laws().items() if not re.match(r"Laws? \d", ast.get_docstring(node) or "")] == []


def test_every_law_is_listed_with_its_examples():
    rows = re.findall(r"^\| [^|]+ \| `(test_\w+::test_\w+)` \| [^|]+ \| ([\d,]+|-) \|", listed(), re.MULTILINE)
    assert {name: examples.replace(",", "") for name, examples in rows} == {
        name: examples_of(node) for name, node in laws().items()
    }


def listed() -> str:
    return (ROOT / "tests" / "laws" / "README.md").read_text(encoding="utf-8")


def examples_of(node: ast.FunctionDef) -> str:
    """The number of examples in `ci` that a law is decorated with."""
    for decorator in node.decorator_list:
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "examples":
            return ast.unparse(decorator.args[0])
    return "-"
