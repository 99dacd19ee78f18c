"""Running a command in a test: at 80 columns, without colours."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvplan.cli import main

ROOT = Path(__file__).parents[1]
SPECS = ROOT / "examples" / "specs"
GPU, HOST, X_PACKED = (str(SPECS / f"{name}.toml") for name in ("gpu_split_kv", "host_block_first", "x_packed"))


WRITE = os.environ.get("KVPLAN_SNAPSHOTS") == "write"


def hold(file: Path, found: str) -> None:
    """Compare with a snapshot, or write it: ``KVPLAN_SNAPSHOTS=write``; read the difference then."""
    if WRITE:
        file.parent.mkdir(exist_ok=True)
        file.write_text(found, encoding="utf-8")
    assert file.exists(), "no snapshot yet: KVPLAN_SNAPSHOTS=write makes it"
    assert found == file.read_text(encoding="utf-8")


def hold_screen(name: str, found: str) -> None:
    """The same of a screen of 80 columns, of ``tests/cli/snapshots``."""
    assert max(map(len, found.splitlines())) <= 80
    hold(Path(__file__).parent / "cli" / "snapshots" / f"{name}.txt", found)


def answer(capsys, *argv, code=0):
    """The text of a command that leaves no note."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NO_COLOR", "1")
        patch.setenv("COLUMNS", "80")
        patch.delenv("FORCE_COLOR", raising=False)
        assert main(argv) == code
    out, err = capsys.readouterr()
    assert err == ""
    return out


def document(capsys, *argv, code=0):
    """The document of a command, by --json."""
    return json.loads(answer(capsys, *argv, "--json", code=code))


def fails(capsys, *argv, code=2):
    """Run a command that fails, and give its one line on stderr."""
    assert main(argv) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("kvplan: ")
    assert err.count("\n") == 1
    return err.removeprefix("kvplan: ").rstrip("\n")


def python(*argv, **env):
    """A fresh interpreter in the repository."""
    known = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR", "COLUMNS")}
    return subprocess.run(
        [sys.executable, *argv], cwd=ROOT, env=known | env, capture_output=True, text=True, encoding="utf-8"
    )


BLOCKED = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ImportError(name + " is not to be had")
sys.meta_path.insert(0, Blocker())
from kvplan.cli import main
sys.exit(main({argv!r}))
"""
