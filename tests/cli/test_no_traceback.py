"""Odd input to every command: one line with a hint, never a traceback."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands import GPU, HOST, ROOT
from tests.patience import PATIENCE


def process(*argv, **streams):
    return subprocess.run([sys.executable, "-m", "kvplan", *argv], cwd=ROOT, check=False, timeout=PATIENCE, **streams)


@pytest.mark.slow
@pytest.mark.parametrize(
    "argv",
    [
        ("inspect", GPU),
        ("inspect", GPU, "--json"),
        ("explain", GPU, HOST),
        ("backends",),
        ("--help",),
        ("--version",),
    ],
    ids=" ".join,
)
def test_a_full_disk(argv):
    with Path("/dev/full").open("w") as full:
        done = process(*argv, stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 2
    assert done.stderr == b"kvplan: cannot write: No space left on device; is the disk full?\n"


@pytest.mark.slow
@pytest.mark.parametrize("argv", [("inspect", GPU), ("inspect", GPU, "--json"), ("explain", GPU, HOST), ("--help",)])
def test_closed_streams(argv):
    done = subprocess.run(  # a shell closes what Python always opens
        ["sh", "-c", '"$@" >&-', "sh", sys.executable, "-m", "kvplan", *argv], cwd=ROOT, check=False, timeout=PATIENCE,
        stderr=subprocess.PIPE,
    )  # fmt: skip
    assert b"Traceback" not in done.stderr
    assert done.returncode in (0, 2)
