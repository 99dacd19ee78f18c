"""Odd input to every command: one line with a hint, never a traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvplan.cli import main
from kvplan.cli.main import COMMANDS
from tests.commands import GPU, HOST, ROOT
from tests.patience import PATIENCE

SPECS_OF = {
    "binary.toml": bytes(range(256)) * 16,
    "binary.json": bytes(range(256)) * 16,
    "deep.json": b"[" * 100_000,
    "deep.toml": b"a = " + b"[" * 100_000,
    "deep_tables.json": b'{"a":' * 100_000,
    "empty.toml": b"",
    "empty.json": b"",
    "digits.json": b'{"notation": "block dim", "sizes": {"block": ' + b"9" * 5000 + b', "dim": 1}}',
    "digits.toml": b'notation = "block dim"\nsizes = {block = ' + b"9" * 5000 + b", dim = 1}",
    "large.json": b'{"notation": "block dim", "sizes": {"block": ' + b"9" * 30 + b', "dim": 1}}',
    "nan.json": b'{"notation": "block dim", "sizes": {"block": NaN, "dim": 1}}',
    "zero.json": rb'{"notation": "block\u0000dim", "sizes": {}}',
    "surrogate.json": rb'{"notation": "\ud800", "sizes": {}}',
    "nested.json": b'{"layouts": [{"layouts": [{}]}]}',
    "kinds.json": b'{"notation": ["block"], "sizes": []}',
    "layers.json": b'{"notation": "block dim", "sizes": {"block": 1, "dim": 1}, "layers": ["a", 1e400]}',
    "seams.json": b'{"notation": "block dim", "sizes": {"block": 9, "dim": 1}, "seams": ["x", {}]}',
}


def said(capsys, *argv):
    """What a command says on stderr: nothing, or one line."""
    code = main(argv)
    out, err = capsys.readouterr()
    assert code in (0, 1, 2)
    assert "Traceback" not in out + err
    assert err.count("\n") in (0, 1)
    assert not err or err.startswith("kvplan: ")
    assert bool(err) or code != 2
    return err


def commands_on(spec):
    """Every command that reads a layout, with this one."""
    yield "inspect", spec
    yield "inspect", spec, "--json"
    yield "plan", spec, GPU, "--src", "0", "--dst", "0"
    yield "explain", GPU, spec
    yield "explain", spec, GPU, "--json"


@pytest.mark.parametrize("name", SPECS_OF)
def test_files_that_are_no_spec(capsys, tmp_path, name):
    path = tmp_path / name
    path.write_bytes(SPECS_OF[name])
    for argv in commands_on(str(path)):
        assert said(capsys, *argv)


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


@pytest.mark.slow
def test_arguments_that_are_no_text():
    done = process("inspect", os.fsdecode(b"\xff\xfe.toml"), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert (done.returncode, done.stdout, done.stderr.count(b"\n")) == (2, b"", 1)


def test_every_command_has_json(capsys):
    lack = []
    for command in COMMANDS:
        assert main([command, "--help"]) == 0
        if "--json" not in capsys.readouterr().out:
            lack.append(command)
    assert not lack
