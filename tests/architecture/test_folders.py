"""The order of the folders: few entries a folder, and one meaning a file name."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "kvplan"
# Importing a module of such a name would put it in the place of a public function, or of a builtin.
FORBIDDEN = {"allocate", "compile", "join", "locate", "reshard", "verify", "common", "helpers", "misc", "utils"}
# Files of one name that mean the same in their rooms.
HOMONYMS = {"explain": {"cost", "program"}, "path": {"execute/host", "execute/gpu"}}


def entries(folder):
    return [entry for entry in folder.iterdir() if entry.name != "__pycache__"]


def folders(*tops):
    """Folders of the package, and of other tops; that of the backends, a link in the package, in its place."""
    found = [ROOT / top for top in ("kvplan", "backends", *tops)]
    found += [path for top in found for path in top.rglob("*") if path.is_dir() and not path.is_symlink()]
    return [folder for folder in found if folder.name != "__pycache__"]


FOLDERS = [str(path.relative_to(ROOT)) for path in folders("benchmarks", "docs", "examples", "tests")]


@pytest.mark.parametrize(("folder", "most"), [("kvplan", 23), ("kvplan/execute", 9)])
def test_the_top_is_seen_at_a_glance(folder, most):
    assert len(entries(ROOT / folder)) <= most


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_holds_twenty_files(folder):
    assert len([entry for entry in entries(ROOT / folder) if entry.is_file()]) <= 20


def test_no_folder_has_the_name_of_a_public_function():
    assert not {folder.name for folder in folders()} & FORBIDDEN


def test_no_two_files_have_one_name():
    """A command may be called like the module that does its work."""
    where = defaultdict(set)
    for folder in folders():
        for file in folder.glob("*.py"):
            room = str(folder.relative_to(PACKAGE if folder.is_relative_to(PACKAGE) else ROOT))
            if file.stem != "__init__" and room != "cli":
                where[file.stem].add(room)
    several = {name: rooms for name, rooms in where.items() if len(rooms) > 1}
    assert several == {name: rooms for name, rooms in HOMONYMS.items() if name in several}
