"""Lines of code a room, words of the documents, files: today's sizes, and the limits of pyproject.toml that hold them.

    $ python -m tools.size

A line of code holds a token other than a comment or a docstring. Prints a table, and exits with 1 where a size is above
its limit in `[tool.size]`.
"""

import ast
import io
import sys
import tokenize
import tomllib
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
SILENT = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)


def main() -> int:
    """Print each size beside its limit."""
    limits = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["size"]
    today = sizes(ROOT)
    above = [name for name, size in today.items() if size > limits.get(name, 0)]
    for name, size in today.items():
        print(f"{name:24} {size:7,} of {limits.get(name, 0):7,}{'  above' if name in above else ''}")
    if above:
        print(
            f"above its limit in [tool.size]: {', '.join(above)}; free room first, limits only go down",
            file=sys.stderr,
        )
    return bool(above)


def sizes(root: Path) -> dict[str, int]:
    """Lines of code of each room, of the package, tests and benchmarks; words of documents; files of the package."""
    rooms = {
        place.name: code(sources(place))
        for place in sorted((root / "kvplan").iterdir())
        if place.is_dir() and not place.is_symlink() and any(place.glob("*.py"))
    }
    rooms["backends"] = code(sources(root / "backends"))
    package = [*sources(root / "kvplan"), *sources(root / "backends")]
    return {
        **rooms,
        "package": code(package),
        "package_files": len(package),
        "tests": code(sources(root / "tests")),
        "benchmarks": code(sources(root / "benchmarks")),
        "words": sum(len(page.read_text().split()) for page in pages(root)),
    }


def sources(place: Path) -> list[Path]:
    """Python files below a folder; links are not followed."""
    return sorted(path for path in place.rglob("*.py") if not path.is_symlink())


def pages(root: Path) -> list[Path]:
    """Documents: those at the top, the site's, and the ones beside code."""
    folders = (root / name for name in ("docs", "benchmarks", "examples", "tests", "kvplan", "backends", ".github"))
    return [*root.glob("*.md"), *(page for folder in folders for page in folder.rglob("*.md"))]


def code(paths: Iterable[Path]) -> int:
    """Lines of code in all files."""
    return sum(lines_of_code(path.read_text()) for path in paths)


def lines_of_code(source: str) -> int:
    r"""Lines that hold a token of code.

    >>> lines_of_code("'A docstring.'\n\nx = (  # a comment\n    1\n)\n")
    3
    """
    docstrings = {
        line
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and ast.get_docstring(node, clean=False) is not None
        for line in range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1)
    }
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    lines = {line for token in tokens if token.type not in SILENT for line in range(token.start[0], token.end[0] + 1)}
    return len(lines - docstrings)


if __name__ == "__main__":
    sys.exit(main())
