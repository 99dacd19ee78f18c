"""The import contract (.importlinter, held by `make lint`) covers every room, and holds what that tool cannot see."""

from __future__ import annotations

import configparser
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def imports():
    """Every module of the package and the modules that it imports, in functions and for annotations too."""
    graph = grimp.build_graph("kvplan", cache_dir=None, exclude_type_checking_imports=False)
    return {name: graph.find_modules_directly_imported_by(name) for name in graph.modules}


def circle(imports):
    """Modules that import one another in turn, the first of them again at the end; [] where there are none."""
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def ignored(contract):
    """The imports that a contract of the file ignores."""
    file = configparser.ConfigParser()
    file.read(ROOT / ".importlinter")
    lines = file[f"importlinter:contract:{contract}"].get("ignore_imports", "").splitlines()
    return {tuple(line.split(" -> ")) for line in lines if " -> " in line}


def test_a_circle_is_found():
    assert {*circle({"a": ["b"], "b": ["c"], "c": ["b"], "d": ["a"]})} == {"b", "c"}


def test_no_modules_import_each_other(imports):
    """The linter compares the files of a folder with each other, and leaves the folder's `__init__` out."""
    up = {("kvplan.layout.kvlayout", "kvplan.draw.block")}
    kept = {name: {other for other in imported if (name, other) not in up} for name, imported in imports.items()}
    assert circle(kept) == []


def test_only_a_layout_looks_up():
    assert ignored("rooms") == {("kvplan.layout.kvlayout", "kvplan.draw.block")}


SHARED = "kvplan.backends._tensors"  # how tensors are nested and their shapes are read, for every adapter


def test_a_backend_imports_no_other_backend(imports):
    """A backend is one file; files with a leading underscore belong to the engine in their name."""
    public = {name for name in imports if name.startswith("kvplan.backends.") and "._" not in name}
    for name in public:
        assert not imports[name] & public
        owned = {other for other in imports[name] if other.startswith("kvplan.backends._")} - {SHARED}
        assert all(other.startswith(name.replace("backends.", "backends._")) for other in owned)
